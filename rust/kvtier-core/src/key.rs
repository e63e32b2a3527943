//! Names of blocks: namespaces, keys, ids.
//!
//! A *namespace* is a 256-bit digest of all that changes the meaning of the bytes. A *key* is 16 to
//! 64 bytes chosen by the caller; kvtier's own are a BLAKE3 [`chain`] in which equal keys mean
//! equal prefixes. Inside, a block's *id* is BLAKE3 of the namespace and the key, so two namespaces
//! never meet.

use crate::error::{Error, Kind, Result};
pub use kvtier_codec::image::Id;

/// A namespace's digest.
pub type Namespace = [u8; 32];

/// The shortest and the longest key.
pub const KEY_LEN: std::ops::RangeInclusive<usize> = 16..=64;

/// The digest of a namespace's canonical identity.
pub fn namespace(identity: &[u8]) -> Namespace {
    *blake3::hash(identity).as_bytes()
}

/// The id of `key` in `namespace`.
pub fn id(namespace: &Namespace, key: &[u8]) -> Result<Id> {
    if !KEY_LEN.contains(&key.len()) {
        return Err(Error::new(
            Kind::InvalidBlock,
            format!(
                "a key of {} bytes was given; a key has 16 to 64 bytes. Use chain(), or a digest of your own key",
                key.len()
            ),
        ));
    }
    let mut joined = [0u8; 96];
    joined[..32].copy_from_slice(namespace);
    joined[32..32 + key.len()].copy_from_slice(key);
    Ok(*blake3::hash(&joined[..32 + key.len()]).as_bytes())
}

/// One key for each block of `block_tokens` tokens, and one for a partial tail if `partial`.
///
/// `key_i = BLAKE3(namespace, key_{i-1}, tokens_i, extras_i)`: every field is preceded by its
/// length in bytes (`u64`, little endian), tokens are `u32` little endian, `key_{-1}` is empty, and
/// so is an absent extra. `extras[i]` belongs to block `i`.
pub fn chain(
    namespace: &Namespace,
    tokens: &[u32],
    block_tokens: usize,
    partial: bool,
    extras: &[Vec<u8>],
) -> Vec<[u8; 32]> {
    let blocks = if partial {
        tokens.len().div_ceil(block_tokens)
    } else {
        tokens.len() / block_tokens
    };
    let mut keys: Vec<[u8; 32]> = Vec::with_capacity(blocks);
    let mut bytes = Vec::with_capacity(block_tokens * 4);
    for (i, block) in tokens.chunks(block_tokens).take(blocks).enumerate() {
        bytes.clear();
        bytes.extend(block.iter().flat_map(|token| token.to_le_bytes()));
        let mut hasher = blake3::Hasher::new();
        let previous = keys.last().map_or(&[][..], |key| &key[..]);
        let extra = extras.get(i).map_or(&[][..], |extra| &extra[..]);
        for field in [&namespace[..], previous, &bytes, extra] {
            hasher.update(&(field.len() as u64).to_le_bytes());
            hasher.update(field);
        }
        keys.push(*hasher.finalize().as_bytes());
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_keys_mean_equal_prefixes() {
        let ns = namespace(b"model");
        let a: Vec<u32> = (0..100).collect();
        let mut b = a.clone();
        b[40] = 7;
        let (ka, kb) = (
            chain(&ns, &a, 16, false, &[]),
            chain(&ns, &b, 16, false, &[]),
        );
        assert_eq!((ka.len(), &ka[..2]), (6, &kb[..2]));
        assert!((2..6).all(|i| ka[i] != kb[i]));
        assert_eq!(chain(&ns, &a, 16, true, &[]).len(), 7);
        assert_ne!(chain(&namespace(b"other"), &a, 16, false, &[])[0], ka[0]);
        let extras = [vec![], b"image".to_vec()];
        let ke = chain(&ns, &a, 16, false, &extras);
        assert_eq!(ke[0], ka[0]);
        assert!((1..6).all(|i| ke[i] != ka[i]));
    }

    #[test]
    fn a_block_of_fewer_tokens_has_another_key() {
        let ns = namespace(b"model");
        let tokens: Vec<u32> = (0..16).collect();
        let full = chain(&ns, &tokens, 16, false, &[])[0];
        assert_ne!(chain(&ns, &tokens[..15], 16, true, &[])[0], full);
    }

    #[test]
    fn keys_of_a_wrong_length_are_refused() {
        let ns = namespace(b"");
        assert!(id(&ns, &[0; 15]).is_err() && id(&ns, &[0; 65]).is_err());
        assert_ne!(id(&ns, &[0; 16]).unwrap(), id(&ns, &[0; 17]).unwrap());
    }
}
