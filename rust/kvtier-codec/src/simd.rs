//! Several instruction sets: which of them runs is found at run time.
//!
//! Every version of a function gives the same bits; the baseline one is the scalar reference.

use std::sync::OnceLock;

/// An instruction set that this processor has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level(Set);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    Baseline,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl Level {
    /// What every processor of this architecture has.
    pub const BASELINE: Level = Level(Set::Baseline);

    /// All that this processor has, the best last.
    pub fn all() -> Vec<Level> {
        #[allow(unused_mut, reason = "where there is no other")]
        let mut found = vec![Level::BASELINE];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("bmi2")
                && is_x86_feature_detected!("f16c")
            {
                found.push(Level(Set::Avx2));
                if is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vbmi")
                {
                    found.push(Level(Set::Avx512));
                }
            }
        }
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("neon") {
            found.push(Level(Set::Neon));
        }
        found
    }

    /// The best that this processor has.
    pub fn best() -> Level {
        static BEST: OnceLock<Level> = OnceLock::new();
        *BEST.get_or_init(|| Level::all().pop().unwrap_or(Level::BASELINE))
    }

    /// `avx512`, `avx2`, `neon` or `scalar`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Set::Baseline => "scalar",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => "avx512",
            #[cfg(target_arch = "aarch64")]
            Set::Neon => "neon",
        }
    }

    #[cfg(target_arch = "aarch64")]
    pub(crate) const fn is_neon(self) -> bool {
        matches!(self.0, Set::Neon)
    }

    #[cfg(target_arch = "x86_64")]
    pub(crate) const fn is_avx2(self) -> bool {
        matches!(self.0, Set::Avx2)
    }

    #[cfg(target_arch = "x86_64")]
    pub(crate) const fn is_avx512(self) -> bool {
        matches!(self.0, Set::Avx512)
    }
}

/// A function that takes a [`Level`] before its arguments, and its body once for each set.
macro_rules! versions {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $type:ty),* $(,)?) -> $out:ty $body:block) => {
        $(#[$doc])*
        $vis fn $name(level: Level, $($arg: $type),*) -> $out {
            #[inline(always)]
            fn body($($arg: $type),*) -> $out $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,bmi2")]
                fn avx2($($arg: $type),*) -> $out {
                    body($($arg),*)
                }

                #[target_feature(enable = "avx2,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi")]
                fn avx512($($arg: $type),*) -> $out {
                    body($($arg),*)
                }

                if level.is_avx512() {
                    // SAFETY: a level exists only where its instruction set was detected.
                    return unsafe { avx512($($arg),*) };
                }
                if level.is_avx2() {
                    // SAFETY: as above.
                    return unsafe { avx2($($arg),*) };
                }
            }
            let _ = level;
            body($($arg),*)
        }
    };
}
pub(crate) use versions;
