//! Reading ahead within one call.

use std::collections::VecDeque;

use crate::error::Result;

/// Bytes that one call has on their way from NVMe, ahead of what it copies.
const BYTES: usize = 32 << 20;

/// Reads under way for the keys of a call that are still to come.
///
/// They hold slots that nobody else can have. Before its call waits for room it must
/// [`Ahead::give_way`], or two calls that each hold what the other waits for would wait for ever.
pub(crate) struct Ahead<P> {
    keys: usize,
    /// The key that is looked at next.
    next: usize,
    /// What was begun, with its key and its bytes.
    pending: VecDeque<(usize, P, usize)>,
    bytes: usize,
}

impl<P> Ahead<P> {
    /// For a call of so many keys.
    pub(crate) fn new(keys: usize) -> Self {
        Ahead {
            keys,
            next: 0,
            pending: VecDeque::new(),
            bytes: 0,
        }
    }

    /// Begins what comes next, as far as it fits, and returns what key `i` waits for; keys are asked for in
    /// order. `begin` returns what it began with its bytes, and whether to go on.
    pub(crate) fn take(
        &mut self,
        i: usize,
        mut begin: impl FnMut(usize) -> Result<(Option<(P, usize)>, bool)>,
    ) -> Result<Option<P>> {
        while self.next < self.keys && (self.next <= i || self.bytes < BYTES) {
            let (begun, go_on) = begin(self.next)?;
            if !go_on && self.next > i {
                break;
            }
            if let Some((pending, bytes)) = begun {
                self.bytes += bytes;
                self.pending.push_back((self.next, pending, bytes));
            }
            self.next += 1;
        }
        let first = self.pending.front().is_some_and(|&(key, ..)| key == i);
        let first = first.then(|| self.pending.pop_front()).flatten();
        Ok(first.map(|(_, pending, bytes)| {
            self.bytes -= bytes;
            pending
        }))
    }

    /// Lets go of all reads for the keys after `i`; workers finish them.
    pub(crate) fn give_way(&mut self, i: usize) {
        self.pending.clear();
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
        // What was given way is begun again, and what it had counted does not count.
        let mut ahead = Ahead::new(5);
        assert_eq!(take(&mut ahead, 0, true), (Some(0), vec![0, 1]));
        assert_eq!(take(&mut ahead, 1, true), (Some(1), vec![2]));
        ahead.give_way(1);
        assert_eq!(take(&mut ahead, 2, true), (Some(2), vec![2, 3]));
        assert_eq!(take(&mut ahead, 3, true), (Some(3), vec![4]));
    }
}
