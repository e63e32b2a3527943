//! What to send to the device next: the order, the bounds and the pace, the same for every engine.

use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use super::{Kind, Op};
use crate::device::Progress;

/// Large operations go in pieces of this size, so that others get between them.
const PIECE: usize = 1 << 20;
/// What is left of an operation goes as one piece up to this size.
const LAST_PIECE: usize = PIECE + PIECE / 2;
/// Pieces in flight, whatever their size.
pub(super) const MAX_PIECES: usize = 128;
/// Bytes that reads may move for each byte of a write that waits.
const READS_PER_WRITE: usize = 4;
/// How far the emulated device may run late and then catch up. A longer pause was idle, which is no credit.
const SLACK: Duration = Duration::from_millis(2);

/// Operations that wait, and those in flight.
pub(super) struct Queue {
    jobs: Vec<Option<Job>>,
    vacant: Vec<usize>,
    /// Urgent reads, reads, writes.
    waiting: [VecDeque<usize>; 3],
    limit: usize,
    in_flight: usize,
    pieces: usize,
    /// Bytes read ahead of a waiting write.
    debt: usize,
    pace: Option<Pace>,
    closed: bool,
}

struct Job {
    op: Op,
    issued: usize,
    pending: usize,
    failure: Option<io::Error>,
}

/// A slowed-down device: a piece is sent when the time that it takes has passed, behind those before it.
struct Pace {
    bytes_per_second: f64,
    busy_until: Instant,
    /// When the next piece may be sent, and what it takes; set when it is first asked for.
    due: Option<(Instant, Duration)>,
}

impl Pace {
    /// When `len` bytes may be sent.
    fn due(&mut self, len: usize, now: Instant) -> Instant {
        let (at, cost) = self.due.unwrap_or_else(|| {
            let cost = Duration::from_secs_f64(len as f64 / self.bytes_per_second);
            let busy = now.saturating_duration_since(self.busy_until) <= SLACK;
            let start = if busy { self.busy_until } else { now };
            (start + cost, cost)
        });
        // A clock that was set back must not make the device busy for ever.
        let at = at.min(now + cost);
        self.due = Some((at, cost));
        at
    }
}

/// A part of an operation, as one request to the device.
pub(super) struct Piece {
    job: usize,
    pub(super) kind: Kind,
    ptr: *mut u8,
    offset: u64,
    len: usize,
    progress: Progress,
}

// SAFETY: the memory belongs to the operation, which lives in the queue until the piece is settled.
unsafe impl Send for Piece {}

/// The answer of [`Queue::next`].
pub(super) enum Next {
    /// Send this.
    Piece(Piece),
    /// Ask again then.
    Wait(Instant),
    /// Ask again when something was added or settled.
    Nothing,
}

/// What follows from the device's answer to a piece.
pub(super) enum Step {
    /// All of it was moved, or it failed.
    Settled(io::Result<()>),
    /// Send the rest.
    Again,
}

/// A completed operation, whose owner is yet to be told.
pub(super) struct Finished {
    op: Op,
    result: io::Result<()>,
}

impl Finished {
    /// Tells the owner. To be called without any lock.
    pub(super) fn tell(self) {
        let Finished { op, result } = self;
        let (done, mut buf) = (op.done, Some(op.buf));
        if op.kind == Kind::Read {
            buf = None;
        }
        let outer = IN_CALLBACK.with(|now| now.replace(true));
        // A panic of the owner must not take down the thread that everybody's I/O goes through.
        if catch_unwind(AssertUnwindSafe(|| done(result))).is_err() {
            tracing::error!("a completion callback panicked");
        }
        IN_CALLBACK.with(|now| now.set(outer));
        drop(buf);
    }
}

crate::sync::thread_local! {
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// Does this thread run a callback now? It must not wait for others then.
pub(crate) fn in_callback() -> bool {
    IN_CALLBACK.with(Cell::get)
}

impl Queue {
    pub(super) fn new(limit: usize, emulate_gbs: Option<f64>, now: Instant) -> Self {
        Queue {
            jobs: Vec::new(),
            vacant: Vec::new(),
            waiting: Default::default(),
            limit,
            in_flight: 0,
            pieces: 0,
            debt: 0,
            pace: emulate_gbs.map(|gbs| Pace {
                bytes_per_second: gbs * 1e9,
                busy_until: now,
                due: None,
            }),
            closed: false,
        }
    }

    /// Adds an operation, or hands it back failed once the queue is closed.
    pub(super) fn push(&mut self, op: Op) -> Result<(), Finished> {
        if self.closed {
            let result = Err(io::Error::other("the engine is closed"));
            return Err(Finished { op, result });
        }
        let line = match (op.kind, op.urgent) {
            (Kind::Read, true) => 0,
            (Kind::Read, false) => 1,
            (Kind::Write, _) => 2,
        };
        let job = Some(Job {
            op,
            issued: 0,
            pending: 0,
            failure: None,
        });
        let index = match self.vacant.pop() {
            Some(index) => {
                self.jobs[index] = job;
                index
            }
            None => {
                self.jobs.push(job);
                self.jobs.len() - 1
            }
        };
        self.waiting[line].push_back(index);
        Ok(())
    }

    /// Begins a read that is one piece, if nothing else waits or is in flight; hands it back otherwise.
    pub(super) fn begin_alone(&mut self, op: Op) -> Result<Piece, Op> {
        let idle = self.vacant.len() == self.jobs.len() && self.pace.is_none() && !self.closed;
        if !idle || op.kind != Kind::Read || op.len > LAST_PIECE || op.len == 0 {
            return Err(op);
        }
        let line = usize::from(!op.urgent);
        let _ = self.push(op); // it is not closed
        match self.cut(line, false) {
            Some(piece) => Ok(piece),
            None => unreachable!("what was just added is the first"),
        }
    }

    /// Takes back a piece that did not get through: it is the next to go.
    pub(super) fn take_back(&mut self, piece: Piece) {
        self.pieces -= 1;
        self.in_flight -= piece.len;
        let Some(job) = self.jobs[piece.job].as_mut() else {
            return;
        };
        job.pending -= 1;
        job.issued = 0;
        self.waiting[usize::from(!job.op.urgent)].push_front(piece.job);
    }

    /// Does any operation wait to be sent, or to end the queue?
    pub(super) fn wants(&self) -> bool {
        self.closed || self.waiting.iter().any(|line| !line.is_empty())
    }

    /// Refuses further operations. Those that were added still run.
    pub(super) fn close(&mut self) {
        self.closed = true;
    }

    /// Was the queue closed, and has all that was added completed?
    pub(super) fn is_finished(&self) -> bool {
        self.closed && self.vacant.len() == self.jobs.len()
    }

    /// Might an operation that is added now be sent at once?
    pub(super) fn has_room(&self) -> bool {
        let room = self.in_flight == 0 || self.in_flight < self.limit + self.limit / 4;
        room && self.pieces < MAX_PIECES
    }

    /// The next piece to send. Reads go ahead of writes, but leave them a share.
    pub(super) fn next(&mut self, now: Instant) -> Next {
        let read = self.waiting[..2].iter().position(|line| !line.is_empty());
        let write = self.waiting[2].front().map(|_| 2);
        let write_due = match (read, write) {
            (Some(_), Some(line)) => self.debt >= READS_PER_WRITE * self.front_len(line),
            _ => true,
        };
        let order = if write_due {
            [write, read]
        } else {
            [read, None]
        };
        for line in order.into_iter().flatten() {
            if !self.fits(line) {
                continue;
            }
            let len = self.front_len(line);
            if let Some(pace) = &mut self.pace {
                let due = pace.due(len, now);
                if due > now {
                    return Next::Wait(due);
                }
                pace.busy_until = due;
                pace.due = None;
            }
            if let Some(piece) = self.cut(line, write.is_some()) {
                return Next::Piece(piece);
            }
        }
        Next::Nothing
    }

    /// Takes back a piece that is settled; returns the operation if that was its last.
    pub(super) fn settle(&mut self, piece: Piece, result: io::Result<()>) -> Option<Finished> {
        self.pieces -= 1;
        self.in_flight -= piece.len;
        let job = self.jobs[piece.job].as_mut()?;
        job.pending -= 1;
        if let Err(e) = result {
            job.failure.get_or_insert(e);
            self.waiting
                .iter_mut()
                .for_each(|line| line.retain(|&i| i != piece.job));
        }
        self.retire(piece.job)
    }

    /// Fails all that was not sent yet; returns the operations of which nothing is in flight.
    pub(super) fn cancel_waiting(&mut self, why: &str) -> Vec<Finished> {
        let mut finished = Vec::new();
        for index in std::mem::take(&mut self.waiting).into_iter().flatten() {
            if let Some(job) = self.jobs[index].as_mut() {
                job.failure
                    .get_or_insert_with(|| io::Error::other(why.to_owned()));
                finished.extend(self.retire(index)); // unless it has pieces in flight
            }
        }
        finished
    }

    /// Removes a job that is complete, or has failed with nothing in flight.
    fn retire(&mut self, index: usize) -> Option<Finished> {
        let job = self.jobs[index].as_ref()?;
        let complete = job.issued == job.op.len || job.failure.is_some();
        if !complete || job.pending > 0 {
            return None;
        }
        let job = self.jobs[index].take()?;
        self.vacant.push(index);
        Some(Finished {
            op: job.op,
            result: job.failure.map_or(Ok(()), Err),
        })
    }

    /// Bytes of the piece that the front of `line` would send.
    fn front_len(&self, line: usize) -> usize {
        let job = self.waiting[line]
            .front()
            .and_then(|&i| self.jobs[i].as_ref());
        let rest = job.map_or(0, |job| job.op.len - job.issued);
        if rest <= LAST_PIECE { rest } else { PIECE }
    }

    /// Is there room in flight? Reads may go a quarter over the limit, so that a hit does not wait
    /// for the writes that fill it.
    fn fits(&self, line: usize) -> bool {
        let limit = match line {
            2 => self.limit,
            _ => self.limit + self.limit / 4,
        };
        let fits = self.in_flight == 0 || self.in_flight + self.front_len(line) <= limit;
        fits && self.pieces < MAX_PIECES
    }

    fn cut(&mut self, line: usize, write_waits: bool) -> Option<Piece> {
        let len = self.front_len(line);
        let index = *self.waiting[line].front()?;
        let job = self.jobs[index].as_mut()?;
        let piece = Piece {
            job: index,
            kind: job.op.kind,
            ptr: job.op.buf.ptr().wrapping_add(job.issued),
            offset: job.op.offset + job.issued as u64,
            len,
            progress: Progress::new(len),
        };
        job.issued += len;
        job.pending += 1;
        if job.issued == job.op.len {
            self.waiting[line].pop_front();
        }
        self.pieces += 1;
        self.in_flight += len;
        if piece.kind == Kind::Write {
            self.debt = 0;
        } else if write_waits {
            self.debt += len;
        }
        Some(piece)
    }
}

impl Piece {
    /// Where the rest of it lies in memory, and how long it is.
    pub(super) fn memory(&self) -> (*mut u8, usize) {
        let moved = self.progress.moved();
        (self.ptr.wrapping_add(moved), self.len - moved)
    }

    /// Where the rest of it lies on the device.
    pub(super) fn offset(&self) -> u64 {
        self.offset + self.progress.moved() as u64
    }

    /// Does this answer, bytes moved or an error's negative number, say that all of it was moved?
    pub(super) fn is_whole(&self, answer: i64) -> bool {
        usize::try_from(answer) == Ok(self.len)
    }

    /// Takes the device's answer: bytes moved, or an error.
    pub(super) fn advance(&mut self, answer: io::Result<usize>) -> Step {
        let eof = match self.kind {
            Kind::Read => io::ErrorKind::UnexpectedEof,
            Kind::Write => io::ErrorKind::WriteZero,
        };
        match self.progress.advance(answer, eof) {
            Some(result) => Step::Settled(result),
            None => Step::Again,
        }
    }
}
