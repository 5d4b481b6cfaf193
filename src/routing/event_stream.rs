//! Puts one engine's event stream in order: what to apply, what to leave out, when to ask for a
//! replay and when to forget. Frames in, actions out; no socket, no clock.
//!
//! An engine numbers its frames from 0 (some from 1) in each of its processes, keeps the last ones
//! for replay, and has no snapshot. So: replay from the start at every connection, live frames
//! waiting meanwhile; a gap is replayed; a number that falls back means a new process.

use std::collections::VecDeque;

/// Live frames that wait for a replay to end. Beyond, the stream starts over.
pub const WAITING_FRAMES_MAX: usize = 4096;

/// How what was missed can be had again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recovery {
    /// By asking for a replay.
    Replay,
    /// By a new connection, which begins with all that the engine keeps.
    Reconnect,
    /// Not at all.
    None,
}

/// What to do next, in order.
#[derive(Debug, PartialEq, Eq)]
pub enum Action<T> {
    /// Close the connection and make a new one.
    Reconnect,
    /// Everything that this stream said is void; a new epoch begins.
    Forget,
    /// Take the frame in.
    Apply(T),
    /// Ask the engine for all frames from this number on.
    Replay(u64),
}

/// Counts of what happened, for metrics.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Tally {
    /// Numbers that were skipped.
    pub gaps: u64,
    /// Frames that had been applied already.
    pub duplicates: u64,
    /// New processes behind the same stream.
    pub restarts: u64,
    /// Replays that began later than asked: what was before is unknown.
    pub lost: u64,
}

impl std::ops::Add for Tally {
    type Output = Tally;
    fn add(self, other: Tally) -> Tally {
        Tally {
            gaps: self.gaps + other.gaps,
            duplicates: self.duplicates + other.duplicates,
            restarts: self.restarts + other.restarts,
            lost: self.lost + other.lost,
        }
    }
}

#[derive(Debug)]
enum Phase<T> {
    /// Nothing may be applied before a replay.
    Disconnected,
    /// A replay from this number is under way; live frames wait.
    Replaying {
        from: u64,
        first: bool,
        waiting: VecDeque<(u64, T)>,
    },
    /// In order.
    Live,
}

/// See the module.
#[derive(Debug)]
pub struct EventStream<T> {
    phase: Phase<T>,
    last: Option<u64>,
    fell_back: bool,
    recovery: Recovery,
    // a break that a new connection has not healed
    unhealed: Option<u64>,
    /// What happened so far.
    pub tally: Tally,
}

impl<T> EventStream<T> {
    /// A stream that nothing is known of.
    pub fn new(recovery: Recovery) -> Self {
        EventStream {
            phase: Phase::Disconnected,
            last: None,
            fell_back: false,
            recovery,
            unhealed: None,
            tally: Tally::default(),
        }
    }

    /// The number of the last applied frame.
    pub fn last(&self) -> Option<u64> {
        self.last
    }

    /// Whether frames are applied as they come.
    pub fn is_live(&self) -> bool {
        matches!(self.phase, Phase::Live)
    }

    /// The connection stands. A restart between two connections cannot be told by numbers alone,
    /// so what was known is void.
    pub fn connected(&mut self) -> Vec<Action<T>> {
        self.start_over()
    }

    /// The connection is gone.
    pub fn disconnected(&mut self) {
        self.phase = Phase::Disconnected;
    }

    fn start_over(&mut self) -> Vec<Action<T>> {
        self.last = None;
        self.fell_back = false;
        if self.recovery != Recovery::Replay {
            self.phase = Phase::Live;
            return vec![Action::Forget];
        }
        self.phase = Phase::Replaying {
            from: 0,
            first: true,
            waiting: VecDeque::new(),
        };
        vec![Action::Forget, Action::Replay(0)]
    }

    /// A frame that cannot be read: what it said is unknown, so it is a gap that a replay may
    /// not heal; only a fresh start does.
    pub fn undecodable(&mut self) -> Vec<Action<T>> {
        self.tally.gaps += 1;
        match self.phase {
            Phase::Disconnected => vec![],
            _ if self.recovery == Recovery::Replay => {
                // the frame will come again, and again not be read: go on behind it
                self.last = None;
                self.phase = Phase::Live;
                vec![Action::Forget]
            }
            _ => {
                self.last = None;
                vec![Action::Forget]
            }
        }
    }

    /// A live frame.
    pub fn live(&mut self, seq: u64, frame: T) -> Vec<Action<T>> {
        match &mut self.phase {
            Phase::Disconnected => vec![],
            Phase::Replaying { waiting, .. } => {
                if waiting.len() >= WAITING_FRAMES_MAX {
                    return self.start_over();
                }
                waiting.push_back((seq, frame));
                vec![]
            }
            Phase::Live => self.in_order(seq, frame),
        }
    }

    fn in_order(&mut self, seq: u64, frame: T) -> Vec<Action<T>> {
        match self.last {
            Some(last) if seq == last => {
                self.tally.duplicates += 1;
                vec![]
            }
            // one step back may be a copy that came late; two in a row, or a fall to the start,
            // are a new process
            Some(last) if seq < last && seq > 1 && !self.fell_back => {
                self.fell_back = true;
                self.tally.duplicates += 1;
                vec![]
            }
            Some(last) if seq < last => {
                self.tally.restarts += 1;
                if self.recovery == Recovery::Reconnect {
                    return vec![Action::Reconnect];
                }
                let mut actions = self.start_over();
                actions.extend(self.live(seq, frame));
                actions
            }
            Some(last) if seq > last.saturating_add(1) => {
                self.tally.gaps += 1;
                if self.recovery == Recovery::Reconnect && self.unhealed != Some(seq) {
                    self.unhealed = Some(seq);
                    return vec![Action::Reconnect];
                }
                if self.recovery != Recovery::Replay {
                    self.last = Some(seq);
                    return vec![Action::Forget, Action::Apply(frame)];
                }
                self.phase = Phase::Replaying {
                    from: last.saturating_add(1),
                    first: true,
                    waiting: VecDeque::from([(seq, frame)]),
                };
                vec![Action::Replay(last.saturating_add(1))]
            }
            _ => {
                self.fell_back = false;
                self.last = Some(seq);
                vec![Action::Apply(frame)]
            }
        }
    }

    /// A replayed frame.
    pub fn replayed(&mut self, seq: u64, frame: T) -> Vec<Action<T>> {
        let Phase::Replaying { from, first, .. } = &mut self.phase else {
            return vec![];
        };
        let mut actions = Vec::new();
        let (asked, is_first) = (*from, std::mem::take(first));
        // some engines begin to count at 1
        if is_first && seq > asked.max(1) {
            self.tally.lost += 1;
            self.last = None;
            if asked > 0 {
                actions.push(Action::Forget);
            }
        }
        match self.last {
            Some(last) if seq <= last => {
                self.tally.duplicates += 1;
                return actions;
            }
            Some(last) if seq > last.saturating_add(1) => {
                // the engine dropped replies: what is between is lost
                self.tally.lost += 1;
                actions.push(Action::Forget);
            }
            _ => {}
        }
        self.last = Some(seq);
        actions.push(Action::Apply(frame));
        actions
    }

    /// In place of a replay's beginning: all that the engine holds after this number. The replay may
    /// go on behind it.
    pub fn snapshot(&mut self, seq: u64, frame: T) -> Vec<Action<T>> {
        let Phase::Replaying { from, first, .. } = &mut self.phase else {
            return vec![];
        };
        (*from, *first) = (seq.saturating_add(1), true);
        self.last = Some(seq);
        vec![Action::Forget, Action::Apply(frame)]
    }

    /// The replay has ended, by its marker or by giving up. What waited follows.
    pub fn replay_ended(&mut self) -> Vec<Action<T>> {
        let Phase::Replaying { from, waiting, .. } = &mut self.phase else {
            return vec![];
        };
        let (asked, waiting) = (*from, std::mem::take(waiting));
        self.phase = Phase::Live;
        let mut actions = Vec::new();
        for (seq, frame) in waiting {
            match self.last {
                Some(last) if seq <= last => self.tally.duplicates += 1,
                Some(last) if seq > last.saturating_add(1) => {
                    // the replay did not reach this far: asking again would not either
                    self.tally.lost += 1;
                    self.last = Some(seq);
                    actions.extend([Action::Forget, Action::Apply(frame)]);
                }
                None if asked > 0 || seq > 1 => {
                    self.tally.lost += 1;
                    self.last = Some(seq);
                    actions.extend([Action::Forget, Action::Apply(frame)]);
                }
                _ => {
                    self.last = Some(seq);
                    actions.push(Action::Apply(frame));
                }
            }
        }
        actions
    }
}

#[cfg(test)]
mod tests {
    use super::Action::{Apply, Forget, Reconnect, Replay};
    use super::*;
    use proptest::prelude::*;

    fn connected() -> EventStream<u64> {
        let mut stream = EventStream::new(Recovery::Replay);
        assert_eq!(stream.connected(), [Forget, Replay(0)]);
        stream
    }

    fn live_after(n: u64) -> EventStream<u64> {
        let mut stream = connected();
        for seq in 0..n {
            assert_eq!(stream.replayed(seq, seq), [Apply(seq)]);
        }
        assert_eq!(stream.replay_ended(), []);
        stream
    }

    #[test]
    fn live_frames_wait_for_the_replay_and_copies_are_dropped() {
        let mut stream = connected();
        assert_eq!(stream.live(2, 2), []);
        assert_eq!(stream.live(3, 3), []);
        for seq in 0..3 {
            assert_eq!(stream.replayed(seq, seq), [Apply(seq)]);
        }
        assert_eq!(stream.replay_ended(), [Apply(3)]);
        assert_eq!(stream.live(4, 4), [Apply(4)]);
        assert_eq!(stream.live(4, 4), []);
        assert_eq!(stream.tally.duplicates, 2);
    }

    #[test]
    fn a_snapshot_stands_for_the_frames_before_it_and_the_replay_goes_on_behind() {
        let mut stream = connected();
        assert_eq!(stream.live(9, 9), []);
        assert_eq!(stream.live(12, 12), []);
        assert_eq!(stream.snapshot(9, 1009), [Forget, Apply(1009)]);
        assert_eq!(stream.replayed(10, 10), [Apply(10)]);
        assert_eq!(stream.replayed(11, 11), [Apply(11)]);
        assert_eq!(stream.replay_ended(), [Apply(12)]);
        assert_eq!((stream.tally.lost, stream.tally.duplicates), (0, 1));
        assert_eq!(
            stream.snapshot(50, 1050),
            [],
            "only while a replay is under way"
        );
    }

    #[test]
    fn what_is_missing_behind_a_snapshot_is_lost() {
        let mut stream = connected();
        stream.snapshot(9, 1009);
        assert_eq!(stream.replayed(15, 15), [Forget, Apply(15)]);
        let mut stream = connected();
        stream.live(12, 12);
        stream.snapshot(9, 1009);
        assert_eq!(stream.replay_ended(), [Forget, Apply(12)]);
        assert_eq!(stream.tally.lost, 1);
    }

    #[test]
    fn a_gap_is_replayed_and_nothing_is_forgotten() {
        let mut stream = live_after(3);
        assert_eq!(stream.live(5, 5), [Replay(3)]);
        assert_eq!(stream.replayed(3, 3), [Apply(3)]);
        assert_eq!(stream.replayed(4, 4), [Apply(4)]);
        assert_eq!(stream.replay_ended(), [Apply(5)]);
        assert_eq!((stream.tally.gaps, stream.tally.lost), (1, 0));
    }

    #[test]
    fn history_that_the_engine_no_longer_has_is_forgotten() {
        let mut stream = live_after(3);
        assert_eq!(stream.live(90, 90), [Replay(3)]);
        assert_eq!(stream.replayed(80, 80), [Forget, Apply(80)]);
        for seq in 81..90 {
            stream.replayed(seq, seq);
        }
        assert_eq!(stream.replay_ended(), [Apply(90)]);
        assert_eq!(stream.tally.lost, 1);
        let mut silent = live_after(3);
        silent.live(7, 7);
        assert_eq!(
            silent.replay_ended(),
            [Forget, Apply(7)],
            "the replay never answered"
        );
    }

    #[test]
    fn a_fall_to_the_start_is_a_new_process_and_a_late_copy_is_not() {
        let mut stream = live_after(9);
        assert_eq!(stream.live(5, 5), []);
        assert_eq!(stream.live(0, 0), [Forget, Replay(0)]);
        assert_eq!(stream.replayed(0, 0), [Apply(0)]);
        assert_eq!(stream.replay_ended(), []);
        assert_eq!(stream.live(1, 1), [Apply(1)]);
        assert_eq!(stream.tally.restarts, 1);
    }

    #[test]
    fn two_steps_back_in_a_row_are_a_new_process_whose_start_was_missed() {
        let mut stream = live_after(9);
        assert_eq!(stream.live(4, 4), [], "perhaps a late copy");
        assert_eq!(stream.live(9, 9), [Apply(9)], "it was one");
        assert_eq!(stream.live(4, 4), []);
        assert_eq!(stream.live(5, 5), [Forget, Replay(0)]);
        assert_eq!(stream.tally.restarts, 1);
    }

    #[test]
    fn an_engine_that_counts_from_one_has_lost_nothing() {
        let mut stream = connected();
        assert_eq!(stream.replayed(1, 1), [Apply(1)]);
        assert_eq!(stream.tally.lost, 0);
    }

    #[test]
    fn without_replay_a_gap_forgets() {
        let mut stream = EventStream::new(Recovery::None);
        assert_eq!(stream.connected(), [Forget]);
        assert_eq!(
            stream.live(7, 7),
            [Apply(7)],
            "a late joiner begins where it is"
        );
        assert_eq!(stream.live(9, 9), [Forget, Apply(9)]);
    }

    #[test]
    fn where_a_connection_begins_with_all_that_is_kept_a_break_makes_a_new_one_once() {
        let mut stream = EventStream::new(Recovery::Reconnect);
        assert_eq!(stream.connected(), [Forget]);
        for seq in 0..3 {
            assert_eq!(stream.live(seq, seq), [Apply(seq)]);
        }
        assert_eq!(stream.live(4, 4), [Reconnect]);
        stream.disconnected();
        assert_eq!(stream.connected(), [Forget]);
        for seq in 0..3 {
            stream.live(seq, seq);
        }
        assert_eq!(
            stream.live(4, 4),
            [Forget, Apply(4)],
            "the engine does not have it either"
        );
        assert_eq!(stream.live(5, 5), [Apply(5)]);
        assert_eq!(stream.live(0, 0), [Reconnect], "a new process");
    }

    #[test]
    fn frames_that_wait_are_bounded() {
        let mut stream = connected();
        for seq in 0..WAITING_FRAMES_MAX as u64 {
            assert_eq!(stream.live(seq, seq), []);
        }
        assert_eq!(stream.live(9999, 9999), [Forget, Replay(0)]);
    }

    /// What an engine kept and what reaches us: any loss on the live socket, a bounded buffer.
    #[derive(Debug, Clone)]
    struct Wire {
        frames: u64,
        buffer: u64,
        lost: Vec<bool>,
        reconnects: Vec<u64>,
    }

    fn wires() -> impl Strategy<Value = Wire> {
        (1u64..60, 1u64..80).prop_flat_map(|(frames, buffer)| {
            let lost = proptest::collection::vec(proptest::bool::weighted(0.2), frames as usize);
            let reconnects = proptest::collection::vec(0..frames, 0..3);
            (lost, reconnects).prop_map(move |(lost, reconnects)| Wire {
                frames,
                buffer,
                lost,
                reconnects,
            })
        })
    }

    proptest! {
        /// Since the last Forget, the applied numbers are contiguous: no hole is ever believed.
        #[test]
        fn what_is_believed_has_no_hole(wire in wires()) {
            let mut stream = EventStream::new(Recovery::Replay);
            let mut believed: Vec<u64> = vec![];
            let mut pending = stream.connected();
            for sent in 0..wire.frames {
                if wire.reconnects.contains(&sent) {
                    stream.disconnected();
                    pending.extend(stream.connected());
                }
                if !wire.lost[sent as usize] {
                    pending.extend(stream.live(sent, sent));
                }
                while !pending.is_empty() {
                    for action in std::mem::take(&mut pending) {
                        match action {
                            Reconnect => prop_assert!(false, "it can replay"),
                            Forget => believed.clear(),
                            Apply(n) => {
                                prop_assert!(believed.last().is_none_or(|last| n == last + 1), "{} after {:?}", n, believed.last());
                                believed.push(n);
                            }
                            Replay(from) => {
                                let oldest = (sent + 1).saturating_sub(wire.buffer);
                                for seq in from.max(oldest)..=sent {
                                    pending.extend(stream.replayed(seq, seq));
                                }
                                pending.extend(stream.replay_ended());
                            }
                        }
                    }
                }
            }
            // with a buffer that holds all, nothing is missing up to the last frame that came
            let last_seen = (0..wire.frames).rev().find(|n| !wire.lost[*n as usize]);
            if wire.buffer > wire.frames && let (Some(first), Some(_)) = (believed.first(), last_seen) {
                prop_assert_eq!(*first, 0);
            }
        }
    }
}
