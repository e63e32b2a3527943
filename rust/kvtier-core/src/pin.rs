//! The pin word of a slot: how many read it, and whether it is on its way out.
//!
//! Pins are taken only under the index shard's lock, by whoever found the slot there; they are
//! dropped anywhere. *Retiring* a slot forbids new pins; whoever sees the count reach zero on a
//! retired slot frees it, and nobody else does.

use crate::sync::atomic::{AtomicU32, Ordering};

const RETIRED: u32 = 1 << 31;

/// What dropping a pin came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unpinned {
    /// Others hold the slot.
    Held,
    /// Nobody holds it any more.
    Idle,
    /// Nobody holds it, and it is retired: the caller frees it.
    Free,
}

/// One slot's pin word. Zero: nobody reads it, and it may be pinned.
#[derive(Debug, Default)]
pub struct PinWord(AtomicU32);

impl PinWord {
    /// Makes the word that of a fresh slot, held once by its writer.
    pub fn start(&self) {
        self.0.store(1, Ordering::Release);
    }

    /// Adds a pin; false if the slot is retired.
    pub fn pin(&self) -> bool {
        self.0
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, |word| {
                (word & RETIRED == 0).then_some(word + 1)
            })
            .is_ok()
    }

    /// Adds a pin to a slot that the caller holds already; retired or not, it cannot go away.
    pub fn pin_held(&self) {
        let before = self.0.fetch_add(1, Ordering::Relaxed);
        debug_assert_ne!(before & !RETIRED, 0, "the caller holds no pin");
    }

    /// Drops a pin.
    #[must_use]
    pub fn unpin(&self) -> Unpinned {
        // In one order with those who count themselves as waiting and then look at the pins.
        let before = self.0.fetch_sub(1, Ordering::SeqCst);
        debug_assert_ne!(before & !RETIRED, 0, "unpinned more often than pinned");
        match before {
            1 => Unpinned::Idle,
            word if word == RETIRED | 1 => Unpinned::Free,
            _ => Unpinned::Held,
        }
    }

    /// Retires the slot. True: nobody holds it, so the caller frees it.
    #[must_use]
    pub fn retire(&self) -> bool {
        self.0.fetch_or(RETIRED, Ordering::AcqRel) == 0
    }

    /// Retires the slot only if exactly `pins` pins are held (by the caller); false changes nothing.
    #[must_use]
    pub fn retire_if(&self, pins: u32) -> bool {
        self.0
            .compare_exchange(pins, RETIRED, Ordering::SeqCst, Ordering::SeqCst)
            .is_ok()
    }

    /// How many hold it now.
    pub fn pins(&self) -> u32 {
        self.0.load(Ordering::SeqCst) & !RETIRED
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exactly_one_party_frees() {
        let word = PinWord::default();
        word.start();
        assert!(word.pin() && word.unpin() == Unpinned::Held);
        assert!(!word.retire(), "the writer still holds it");
        assert!(!word.pin(), "no pin on a retired slot");
        assert_eq!(word.unpin(), Unpinned::Free, "the last pin frees");
        let idle = PinWord::default();
        assert!(idle.retire());
    }

    #[test]
    fn a_conditional_retire_needs_the_exact_count() {
        let word = PinWord::default();
        assert!(word.pin());
        assert!(!word.retire_if(0) && word.retire_if(1));
        assert!(!word.pin());
        word.start();
        assert_eq!(word.unpin(), Unpinned::Idle);
    }
}
