//! Sixteen numbers at once: what the kernels are written in, and its portable version.

/// Elements that are worked on at once: two vectors of [`WIDTH`].
pub(super) const UNIT: usize = 32;

/// Numbers in a vector.
pub(super) const WIDTH: usize = 16;

/// Two vectors, for the elements of a unit in order.
pub(super) type Pair<T> = [T; 2];

/// Vectors of sixteen on one instruction set. All versions give the same bits. A value of a type
/// that implements this exists only where the processor has the set.
pub(super) trait Lanes: Copy {
    /// Single-precision numbers.
    type F: Copy;
    /// Integers of 32 bits.
    type I: Copy;

    /// Fetches the line at some distance behind an address, which may be anywhere.
    fn fetch(self, from: *const u8);
    fn floats(self, from: &[f32; WIDTH]) -> Self::F;
    fn to_floats(self, x: Self::F) -> [f32; WIDTH];
    fn to_ints(self, x: Self::I) -> [u32; WIDTH];
    fn splat(self, x: f32) -> Self::F;
    fn splat_bits(self, x: u32) -> Self::I;

    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// The bits of a number.
    fn bits(self, x: Self::F) -> Self::I;
    /// The number of some bits.
    fn number(self, x: Self::I) -> Self::F;
    /// The number that a non-negative integer is.
    fn float(self, x: Self::I) -> Self::F;

    fn plus(self, a: Self::I, b: Self::I) -> Self::I;
    fn minus(self, a: Self::I, b: Self::I) -> Self::I;
    fn and(self, a: Self::I, b: Self::I) -> Self::I;
    fn or(self, a: Self::I, b: Self::I) -> Self::I;
    fn left(self, x: Self::I, by: u32) -> Self::I;
    fn right(self, x: Self::I, by: u32) -> Self::I;
    fn min_signed(self, a: Self::I, b: Self::I) -> Self::I;
    fn max_signed(self, a: Self::I, b: Self::I) -> Self::I;
    fn min_unsigned(self, a: Self::I, b: Self::I) -> Self::I;
    fn max_unsigned(self, a: Self::I, b: Self::I) -> Self::I;
    /// `then` where a < b, both not negative, else `other`.
    fn if_below(self, a: Self::I, b: Self::I, then: Self::I, other: Self::I) -> Self::I;

    /// Bytes as integers.
    fn bytes(self, from: &[u8; UNIT]) -> Pair<Self::I>;
    /// As [`Lanes::bytes`] of one vector.
    fn few_bytes(self, from: &[u8; WIDTH]) -> Self::I;
    /// Integers below 256 as bytes.
    fn to_bytes(self, x: Pair<Self::I>) -> [u8; UNIT];
    /// As [`Lanes::to_bytes`] of one vector.
    fn to_few_bytes(self, x: Self::I) -> [u8; WIDTH];
    /// Integers whose upper halves are these, and whose lower halves are zero.
    fn uppers(self, from: &[u8; 2 * UNIT]) -> Pair<Self::I>;
    /// The upper halves of integers.
    fn to_uppers(self, x: Pair<Self::I>) -> [u8; 2 * UNIT];
    fn words(self, from: &[u8; 4 * UNIT]) -> Pair<Self::I>;
    fn to_words(self, x: Pair<Self::I>) -> [u8; 4 * UNIT];
    /// IEEE halves that are finite as numbers; of others, any.
    fn halves(self, from: &[u8; 2 * UNIT]) -> Pair<Self::F>;
    /// The nearest halves, half to even, to numbers that are none below -65,504 or above 65,504.
    fn to_halves(self, x: Pair<Self::F>) -> [u8; 2 * UNIT];
}

/// Arithmetic that every processor has: the reference.
#[derive(Clone, Copy)]
pub(super) struct Portable;

#[inline(always)]
fn each<A: Copy, B: Copy + Default>(a: [A; WIDTH], f: impl Fn(A) -> B) -> [B; WIDTH] {
    both(a, a, |a, _| f(a))
}

#[inline(always)]
fn both<A: Copy, B: Copy + Default>(
    a: [A; WIDTH],
    b: [A; WIDTH],
    f: impl Fn(A, A) -> B,
) -> [B; WIDTH] {
    let mut all = [B::default(); WIDTH];
    for i in 0..WIDTH {
        all[i] = f(a[i], b[i]);
    }
    all
}

/// Two vectors of what `f` makes of an element's place.
#[inline(always)]
fn unit<T: Copy + Default>(f: impl Fn(usize) -> T) -> Pair<[T; WIDTH]> {
    let mut all = [[T::default(); WIDTH]; 2];
    for (i, x) in all.as_flattened_mut().iter_mut().enumerate() {
        *x = f(i);
    }
    all
}

/// Bytes of each element of two vectors, in order.
#[inline(always)]
fn flat<T: Copy, const N: usize, const ALL: usize>(
    x: Pair<[T; WIDTH]>,
    f: impl Fn(T) -> [u8; N],
) -> [u8; ALL] {
    let mut all = [0; ALL];
    for (to, &x) in all.as_chunks_mut::<N>().0.iter_mut().zip(x.as_flattened()) {
        *to = f(x);
    }
    all
}

impl Lanes for Portable {
    type F = [f32; WIDTH];
    type I = [u32; WIDTH];

    #[inline(always)]
    fn fetch(self, _: *const u8) {}

    #[inline(always)]
    fn floats(self, from: &[f32; WIDTH]) -> Self::F {
        *from
    }
    #[inline(always)]
    fn to_floats(self, x: Self::F) -> [f32; WIDTH] {
        x
    }
    #[inline(always)]
    fn to_ints(self, x: Self::I) -> [u32; WIDTH] {
        x
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; WIDTH]
    }
    #[inline(always)]
    fn splat_bits(self, x: u32) -> Self::I {
        [x; WIDTH]
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        both(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        both(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        both(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        both(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn bits(self, x: Self::F) -> Self::I {
        each(x, f32::to_bits)
    }
    #[inline(always)]
    fn number(self, x: Self::I) -> Self::F {
        each(x, f32::from_bits)
    }
    #[inline(always)]
    fn float(self, x: Self::I) -> Self::F {
        each(x, |x| x as f32)
    }
    #[inline(always)]
    fn plus(self, a: Self::I, b: Self::I) -> Self::I {
        both(a, b, u32::wrapping_add)
    }
    #[inline(always)]
    fn minus(self, a: Self::I, b: Self::I) -> Self::I {
        both(a, b, u32::wrapping_sub)
    }
    #[inline(always)]
    fn and(self, a: Self::I, b: Self::I) -> Self::I {
        both(a, b, |a, b| a & b)
    }
    #[inline(always)]
    fn or(self, a: Self::I, b: Self::I) -> Self::I {
        both(a, b, |a, b| a | b)
    }
    #[inline(always)]
    fn left(self, x: Self::I, by: u32) -> Self::I {
        each(x, |x| x << by)
    }
    #[inline(always)]
    fn right(self, x: Self::I, by: u32) -> Self::I {
        each(x, |x| x >> by)
    }
    #[inline(always)]
    fn min_signed(self, a: Self::I, b: Self::I) -> Self::I {
        both(a, b, |a, b| (a as i32).min(b as i32) as u32)
    }
    #[inline(always)]
    fn max_signed(self, a: Self::I, b: Self::I) -> Self::I {
        both(a, b, |a, b| (a as i32).max(b as i32) as u32)
    }
    #[inline(always)]
    fn min_unsigned(self, a: Self::I, b: Self::I) -> Self::I {
        both(a, b, u32::min)
    }
    #[inline(always)]
    fn max_unsigned(self, a: Self::I, b: Self::I) -> Self::I {
        both(a, b, u32::max)
    }
    #[inline(always)]
    fn if_below(self, a: Self::I, b: Self::I, then: Self::I, other: Self::I) -> Self::I {
        let mut all = other;
        for i in 0..WIDTH {
            all[i] = if a[i] < b[i] { then[i] } else { other[i] };
        }
        all
    }
    #[inline(always)]
    fn bytes(self, from: &[u8; UNIT]) -> Pair<Self::I> {
        unit(|i| u32::from(from[i]))
    }
    #[inline(always)]
    fn few_bytes(self, from: &[u8; WIDTH]) -> Self::I {
        each(*from, u32::from)
    }
    #[inline(always)]
    fn to_bytes(self, x: Pair<Self::I>) -> [u8; UNIT] {
        flat(x, |x| [x as u8])
    }
    #[inline(always)]
    fn to_few_bytes(self, x: Self::I) -> [u8; WIDTH] {
        each(x, |x| x as u8)
    }
    #[inline(always)]
    fn uppers(self, from: &[u8; 2 * UNIT]) -> Pair<Self::I> {
        let from = from.as_chunks::<2>().0;
        unit(|i| u32::from(u16::from_le_bytes(from[i])) << 16)
    }
    #[inline(always)]
    fn to_uppers(self, x: Pair<Self::I>) -> [u8; 2 * UNIT] {
        flat(x, |x| ((x >> 16) as u16).to_le_bytes())
    }
    #[inline(always)]
    fn words(self, from: &[u8; 4 * UNIT]) -> Pair<Self::I> {
        let from = from.as_chunks::<4>().0;
        unit(|i| u32::from_le_bytes(from[i]))
    }
    #[inline(always)]
    fn to_words(self, x: Pair<Self::I>) -> [u8; 4 * UNIT] {
        flat(x, u32::to_le_bytes)
    }
    #[inline(always)]
    fn halves(self, from: &[u8; 2 * UNIT]) -> Pair<Self::F> {
        let from = from.as_chunks::<2>().0;
        unit(|i| crate::float::from_f16(u16::from_le_bytes(from[i])))
    }
    #[inline(always)]
    fn to_halves(self, x: Pair<Self::F>) -> [u8; 2 * UNIT] {
        flat(x, |x| crate::float::to_f16(x).to_le_bytes())
    }
}
