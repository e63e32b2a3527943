//! Sizes as people read them in messages.

use std::fmt;

const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
/// Below this a plain number reads well.
const PLAIN: u64 = 10_000;

/// A number of bytes: `4096 bytes`, `400 GiB`, and where that is not exact `93.1 GiB (100000000000 bytes)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Bytes(count) = *self;
        if count < PLAIN {
            return write!(f, "{count} byte{}", if count == 1 { "" } else { "s" });
        }
        let power = (count.ilog2() / 10).min(UNITS.len() as u32);
        let (unit, one) = (UNITS[power as usize - 1], 1u64 << (10 * power));
        if count.is_multiple_of(one) {
            return write!(f, "{} {unit}", count / one);
        }
        write!(f, "{:.1} {unit} ({count} bytes)", count as f64 / one as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::Bytes;

    #[test]
    fn a_size_reads_well_and_loses_nothing() {
        let read = |count| Bytes(count).to_string();
        assert_eq!(read(0), "0 bytes");
        assert_eq!(read(1), "1 byte");
        assert_eq!(read(9_999), "9999 bytes");
        assert_eq!(read(10_240), "10 KiB");
        assert_eq!(read(10_241), "10.0 KiB (10241 bytes)");
        assert_eq!(read(1 << 20), "1 MiB");
        assert_eq!(read(400 << 30), "400 GiB");
        assert_eq!(read(100_000_000_000), "93.1 GiB (100000000000 bytes)");
        assert_eq!(read(16 << 40), "16 TiB");
        assert_eq!(read(u64::MAX), "16384.0 PiB (18446744073709551615 bytes)");
    }
}
