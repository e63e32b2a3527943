//! One load with many who want it, under every order of steps: exactly one finishes it, all who wait
//! are told, and nobody waits for ever.

use std::time::{Duration, Instant};

use kvtier_races::LONG_AGO;
use kvtier_races::flight::{Course, Wait};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

struct Flight {
    course: Course<(), ()>,
    finished: AtomicUsize,
    told: AtomicUsize,
}

impl Flight {
    fn begin(watchers: usize) -> Arc<Self> {
        let _ = *LONG_AGO; // sets it
        let flight = Arc::new(Flight {
            course: Course::new(watchers),
            finished: AtomicUsize::new(0),
            told: AtomicUsize::new(0),
        });
        let teller = flight.clone();
        flight.course.on_landing(Box::new(move |landing| {
            assert_eq!(landing, Ok(()));
            teller.told.fetch_add(1, Ordering::Relaxed);
        }));
        flight
    }

    fn finish(&self) {
        self.finished.fetch_add(1, Ordering::Relaxed);
        self.course.land(Ok(()));
    }

    /// What a worker does with a flight that nobody waits for.
    fn later(&self) {
        if self.course.claim().is_some() {
            self.finish();
        }
    }

    /// A waiter, who watches already.
    fn wait(&self, deadline: Instant) {
        match self.course.wait(deadline) {
            Wait::Finish(()) => self.finish(),
            Wait::Landed(landing) => assert_eq!(landing, Ok(())),
            Wait::TimedOut => assert!(deadline <= *LONG_AGO),
        }
        if self.course.unwatch() {
            self.later();
        }
    }

    /// The ring's thread.
    fn complete(&self) {
        self.course.depart();
        if self.course.arrive(()) {
            self.later();
        }
    }
}

fn all(deadlines: &'static [bool]) {
    kvtier_races::model(move || {
        let flight = Flight::begin(deadlines.len());
        let waiters: Vec<_> = deadlines
            .iter()
            .map(|&patient| {
                let flight = flight.clone();
                let far = *LONG_AGO + Duration::from_secs(1 << 20);
                let deadline = if patient { far } else { *LONG_AGO };
                thread::spawn(move || flight.wait(deadline))
            })
            .collect();
        flight.complete();
        waiters
            .into_iter()
            .for_each(|waiter| waiter.join().unwrap());
        assert_eq!(flight.finished.load(Ordering::Relaxed), 1);
        assert_eq!(flight.told.load(Ordering::Relaxed), 1);
        let told = flight.clone();
        let late = move |_| assert_eq!(told.told.fetch_add(1, Ordering::Relaxed), 1);
        flight.course.on_landing(Box::new(late)); // at once: it has landed
        assert_eq!(flight.told.load(Ordering::Relaxed), 2);
    });
}

#[test]
fn one_of_several_waiters_finishes_it_and_the_others_are_told() {
    all(&[true, true]);
}

#[test]
fn who_gives_up_leaves_it_to_the_others_or_to_a_worker() {
    all(&[false, true]);
    all(&[false, false]);
}

#[test]
fn with_nobody_waiting_a_worker_finishes_it() {
    all(&[]);
    all(&[false]);
}

#[test]
fn joining_late_finds_it_landed_or_finishes_it() {
    kvtier_races::model(|| {
        let flight = Flight::begin(0);
        let joins = flight.clone();
        let waiter = thread::spawn(move || {
            joins.course.watch();
            joins.wait(*LONG_AGO + Duration::from_secs(1 << 20));
        });
        flight.complete();
        waiter.join().unwrap();
        assert_eq!(flight.finished.load(Ordering::Relaxed), 1);
    });
}
