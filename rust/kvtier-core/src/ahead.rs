//! Reading ahead within one call.

use crate::error::Result;

/// Bytes that one call has on their way from NVMe, ahead of what it copies.
const BYTES: usize = 32 << 20;

/// Reads under way for the keys of a call that are still to come.
///
/// They hold slots that nobody else can have. Before its call waits for room it must
/// [`Ahead::give_way`], or two calls that each hold what the other waits for would wait for ever.
pub(crate) struct Ahead<P> {
    pending: Vec<Option<(P, usize)>>,
    next: usize,
    bytes: usize,
}

impl<P> Ahead<P> {
    /// For a call of so many keys.
    pub(crate) fn new(keys: usize) -> Self {
        let mut pending = Vec::new();
        pending.resize_with(keys, || None);
        Ahead {
            pending,
            next: 0,
            bytes: 0,
        }
    }

    /// Begins what comes next, as far as it fits, and returns what key `i` waits for. `begin`
    /// returns what it began with its bytes, and whether to go on.
    pub(crate) fn take(
        &mut self,
        i: usize,
        mut begin: impl FnMut(usize) -> Result<(Option<(P, usize)>, bool)>,
    ) -> Result<Option<P>> {
        while self.next < self.pending.len() && (self.next <= i || self.bytes < BYTES) {
            let (begun, go_on) = begin(self.next)?;
            self.bytes += begun.as_ref().map_or(0, |b| b.1);
            if !go_on && self.next > i {
                break;
            }
            self.pending[self.next] = begun;
            self.next += 1;
        }
        Ok(self.pending[i].take().map(|(pending, bytes)| {
            self.bytes -= bytes;
            pending
        }))
    }

    /// Lets go of all reads for the keys after `i`; workers finish them.
    pub(crate) fn give_way(&mut self, i: usize) {
        self.pending[i + 1..].iter_mut().for_each(|p| *p = None);
        self.bytes = 0;
        self.next = i + 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_begins_what_fits_and_never_less_than_what_is_asked_for() {
        let mut ahead = Ahead::new(4);
        let mut begun = Vec::new();
        let mut take = |ahead: &mut Ahead<usize>, i, fits: bool| {
            let taken = ahead.take(i, |next| {
                begun.push(next);
                Ok(if fits {
                    (Some((next, BYTES / 2)), true)
                } else {
                    (None, false)
                })
            });
            (taken.unwrap(), std::mem::take(&mut begun))
        };
        assert_eq!(take(&mut ahead, 0, true), (Some(0), vec![0, 1]));
        assert_eq!(take(&mut ahead, 1, false), (Some(1), vec![2]));
        assert_eq!(take(&mut ahead, 2, false), (None, vec![2, 3]));
        ahead.give_way(2);
        assert_eq!(take(&mut ahead, 3, true), (Some(3), vec![3]));
    }
}
