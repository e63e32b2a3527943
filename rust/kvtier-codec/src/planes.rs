//! Byte planes: all first bytes of the elements, then all second bytes. The bytes of a plane are
//! alike, which an entropy coder likes.

use crate::simd::{Level, versions};

/// Writes the first bytes of all elements of `src`, `size` bytes each, then the second ones.
///
/// # Panics
/// If the lengths disagree, or `size` is not 1, 2 or 4.
pub fn split(size: usize, src: &[u8], dst: &mut [u8]) {
    split_at(Level::best(), size, src, dst);
}

/// The inverse of [`split`], where the planes may be parts of longer ones: plane `i` begins at
/// `i * stride`.
///
/// # Panics
/// If the planes lie outside of `src`, or as for [`split`].
pub fn merge(size: usize, src: &[u8], stride: usize, dst: &mut [u8]) {
    merge_at(Level::best(), size, src, stride, dst);
}

versions! {
    /// [`split`] on one instruction set.
    pub(crate) fn split_at(size: usize, src: &[u8], dst: &mut [u8]) -> () {
        assert_eq!(src.len(), dst.len());
        assert!(src.len().is_multiple_of(size));
        let n = src.len() / size;
        match size {
            1 => dst.copy_from_slice(src),
            2 => {
                let (a, b) = dst.split_at_mut(n);
                for ((x, a), b) in src.as_chunks::<2>().0.iter().zip(a).zip(b) {
                    [*a, *b] = *x;
                }
            }
            4 => {
                let (a, rest) = dst.split_at_mut(n);
                let (b, rest) = rest.split_at_mut(n);
                let (c, d) = rest.split_at_mut(n);
                for ((((x, a), b), c), d) in src.as_chunks::<4>().0.iter().zip(a).zip(b).zip(c).zip(d) {
                    [*a, *b, *c, *d] = *x;
                }
            }
            _ => panic!("elements of {size} bytes"),
        }
    }
}

versions! {
    /// [`merge`] on one instruction set.
    pub(crate) fn merge_at(size: usize, src: &[u8], stride: usize, dst: &mut [u8]) -> () {
        assert!(dst.len().is_multiple_of(size));
        let n = dst.len() / size;
        let plane = |i: usize| &src[i * stride..][..n];
        match size {
            1 => dst.copy_from_slice(plane(0)),
            2 => {
                let (a, b) = (plane(0), plane(1));
                for ((x, a), b) in dst.as_chunks_mut::<2>().0.iter_mut().zip(a).zip(b) {
                    *x = [*a, *b];
                }
            }
            4 => {
                let (a, b, c, d) = (plane(0), plane(1), plane(2), plane(3));
                for ((((x, a), b), c), d) in
                    dst.as_chunks_mut::<4>().0.iter_mut().zip(a).zip(b).zip(c).zip(d)
                {
                    *x = [*a, *b, *c, *d];
                }
            }
            _ => panic!("elements of {size} bytes"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_splits_and_merges_alike() {
        for size in [1, 2, 4] {
            for n in [0, 1, 3, 31, 32, 64, 100, 257] {
                let src: Vec<u8> = (0..n * size).map(|i| (i * 37 + i / 11) as u8).collect();
                let mut want = vec![0; src.len()];
                for (i, &byte) in src.iter().enumerate() {
                    want[i % size * n + i / size] = byte;
                }
                for level in Level::all() {
                    let mut planes = vec![0; src.len()];
                    split_at(level, size, &src, &mut planes);
                    assert_eq!(planes, want, "{level:?}");
                    let mut back = vec![0; src.len()];
                    merge_at(level, size, &planes, n, &mut back);
                    assert_eq!(back, src, "{level:?}");
                    let (from, to) = (n / 3, n - n / 4);
                    let mut part = vec![0; (to - from) * size];
                    merge_at(level, size, &planes[from..], n, &mut part);
                    assert_eq!(part, src[from * size..to * size], "{level:?}");
                }
            }
        }
    }
}
