//! Turns probe results into a backend's health: a state machine without clock or socket.

/// What is known of a backend's health.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum HealthState {
    /// No probe has succeeded yet; probed fast.
    #[default]
    Starting,
    /// Takes requests.
    Healthy,
    /// Failed `unhealthy_threshold` probes in a row.
    Unhealthy,
    /// Its own actors keep dying; out until a restart or reload.
    Failed,
}

impl HealthState {
    /// The word used in metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            HealthState::Starting => "starting",
            HealthState::Healthy => "healthy",
            HealthState::Unhealthy => "unhealthy",
            HealthState::Failed => "failed",
        }
    }
}

/// What one probe saw.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Probe {
    /// A 2xx answer in time.
    Ok,
    /// No answer in time.
    TimedOut,
    /// The connection was refused or cut: nobody is there.
    Refused,
    /// An answer that is not 2xx.
    BadStatus(u16),
}

impl Probe {
    /// The word used in metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Probe::Ok => "ok",
            Probe::TimedOut => "timeout",
            Probe::Refused => "refused",
            Probe::BadStatus(_) => "bad_status",
        }
    }
}

/// `unhealthy_threshold` and `healthy_threshold` of the settings.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HealthRules {
    /// Failures in a row that take a backend out.
    pub unhealthy_threshold: u32,
    /// Successes in a row that bring an unhealthy backend back.
    pub healthy_threshold: u32,
}

/// Why a change came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// The new state.
    pub to: HealthState,
    /// Whether only probe timeouts and 4xx led here: a floor may veto it, see [`may_eject`].
    pub by_timeouts_only: bool,
}

/// One backend's health.
#[derive(Debug)]
pub struct Health {
    rules: HealthRules,
    state: HealthState,
    failures: u32,
    hard_failures: u32,
    successes: u32,
}

impl Health {
    /// Begins with what is known: [`HealthState::Starting`] for a backend that nobody has probed.
    pub fn new(rules: HealthRules, state: HealthState) -> Self {
        Health {
            rules,
            state,
            failures: 0,
            hard_failures: 0,
            successes: 0,
        }
    }

    /// The state now.
    pub fn state(&self) -> HealthState {
        self.state
    }

    /// Takes in one probe. `progressed` says whether the backend has sent answer bytes since the
    /// last probe: then a timeout only says that it is busy, and changes nothing.
    pub fn on_probe(&mut self, probe: Probe, progressed: bool) -> Option<Change> {
        match probe {
            Probe::Ok => self.on_success(),
            Probe::TimedOut if progressed => None,
            Probe::TimedOut => self.on_failure(false),
            Probe::Refused | Probe::BadStatus(500..) => self.on_failure(true),
            // it answers, so it is there: perhaps too busy (429), perhaps the wrong path
            Probe::BadStatus(_) => self.on_failure(false),
        }
    }

    fn on_success(&mut self) -> Option<Change> {
        self.failures = 0;
        self.hard_failures = 0;
        self.successes = self.successes.saturating_add(1);
        let needed = match self.state {
            HealthState::Starting => 1,
            HealthState::Unhealthy => self.rules.healthy_threshold,
            HealthState::Healthy | HealthState::Failed => return None,
        };
        (self.successes >= needed).then(|| self.enter(HealthState::Healthy))
    }

    fn on_failure(&mut self, hard: bool) -> Option<Change> {
        self.successes = 0;
        self.failures = self.failures.saturating_add(1);
        self.hard_failures = self.hard_failures.saturating_add(u32::from(hard));
        let down =
            self.state == HealthState::Healthy && self.failures >= self.rules.unhealthy_threshold;
        down.then(|| self.enter(HealthState::Unhealthy))
    }

    /// The change was vetoed: stay in, and eject at the next failure if the veto is gone by then.
    pub fn vetoed(&mut self) {
        self.state = HealthState::Healthy;
        self.failures = self.rules.unhealthy_threshold.saturating_sub(1);
    }

    fn enter(&mut self, to: HealthState) -> Change {
        let by_timeouts_only = self.hard_failures == 0;
        self.state = to;
        self.failures = 0;
        self.hard_failures = 0;
        self.successes = 0;
        Change {
            to,
            by_timeouts_only,
        }
    }
}

/// Whether probe timeouts may take one more backend out of a pool of `members`, of which
/// `healthy` (that one included) serve: never below half, so that a saturated fleet is not
/// emptied because every probe is slow. Refused connections and 5xx need no leave.
pub fn may_eject(healthy: usize, members: usize) -> bool {
    (healthy.saturating_sub(1)) * 2 >= members
}

#[cfg(test)]
mod tests {
    use super::*;

    fn health() -> Health {
        let rules = HealthRules {
            unhealthy_threshold: 3,
            healthy_threshold: 2,
        };
        Health::new(rules, HealthState::Starting)
    }

    fn states(results: &str) -> Vec<HealthState> {
        let mut health = health();
        let mut changes = vec![];
        for result in results.chars() {
            let probe = match result {
                'S' => Probe::Ok,
                'T' => Probe::TimedOut,
                _ => Probe::Refused,
            };
            changes.extend(health.on_probe(probe, false).map(|c| c.to));
        }
        changes
    }

    #[test]
    fn only_failures_in_a_row_take_a_worker_out_and_only_successes_in_a_row_bring_it_back() {
        use HealthState::*;
        assert_eq!(states("S"), [Healthy], "the first success ends the warm-up");
        assert_eq!(states("FSFFSFFFSS"), [Healthy, Unhealthy, Healthy]);
        assert_eq!(
            states("SFFSFFS"),
            [Healthy],
            "flaps below the threshold change nothing"
        );
        assert_eq!(
            states("SFFFSFSF"),
            [Healthy, Unhealthy],
            "one success is not enough"
        );
    }

    #[test]
    fn a_timeout_is_neutral_while_tokens_flow() {
        let mut health = health();
        health.on_probe(Probe::Ok, false);
        for _ in 0..20 {
            assert_eq!(health.on_probe(Probe::TimedOut, true), None);
        }
        assert_eq!(health.state(), HealthState::Healthy);
        for _ in 0..2 {
            assert_eq!(health.on_probe(Probe::Refused, true), None);
        }
        let change = health.on_probe(Probe::Refused, true).unwrap();
        assert_eq!(
            change.to,
            HealthState::Unhealthy,
            "refused is never neutral"
        );
        assert!(!change.by_timeouts_only);
    }

    #[test]
    fn a_vetoed_ejection_is_tried_again_at_the_next_failure() {
        let mut health = health();
        health.on_probe(Probe::Ok, false);
        health.on_probe(Probe::TimedOut, false);
        health.on_probe(Probe::TimedOut, false);
        assert!(
            health
                .on_probe(Probe::TimedOut, false)
                .unwrap()
                .by_timeouts_only
        );
        health.vetoed();
        assert_eq!(health.state(), HealthState::Healthy);
        assert!(health.on_probe(Probe::TimedOut, false).is_some());
    }

    #[test]
    fn timeouts_never_eject_below_half_of_the_pool() {
        assert!(may_eject(4, 4));
        assert!(may_eject(3, 4));
        assert!(!may_eject(2, 4));
        assert!(!may_eject(1, 1), "the only worker stays");
        for members in 1..20usize {
            let mut healthy = members;
            while may_eject(healthy, members) {
                healthy -= 1;
            }
            assert!(healthy * 2 >= members && healthy >= 1);
        }
    }
}
