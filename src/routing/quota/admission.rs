//! Who may run at one time, and who is next. A request needs a place in each of its limits; where one is
//! full it waits, in a queue that is bounded. Whoever leaves makes room for the waiting request that has the
//! highest priority, then whose tenant has the fewest running, then that came first.

use super::{Priority, Scope};
use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;

/// A place that a request needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Need {
    /// Whose limit it is.
    pub scope: Scope,
    /// Which key, tenant, model or address.
    pub name: Arc<str>,
    /// Places that there are.
    pub limit: u32,
}

/// A request that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(u64);

/// There is no room to wait either.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Full;

#[derive(Debug)]
struct Waiter {
    ticket: Ticket,
    priority: Priority,
    tenant: Arc<str>,
    needs: Vec<Need>,
}

/// Places of one limit that are taken.
#[derive(Debug, Clone, Copy, Default)]
struct Place {
    taken: u32,
    /// As whoever came last has it: limits change, also for those that wait.
    limit: u32,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Admission {
    places: HashMap<(Scope, Arc<str>), Place>,
    tenants: HashMap<Arc<str>, u32>,
    waiting: Vec<Waiter>,
    last: u64,
}

impl Admission {
    /// The first of a request's limits that is full.
    fn lacking<'n>(&self, needs: &'n [Need]) -> Option<&'n Need> {
        let is_full = |need: &&Need| {
            let place = self.places.get(&(need.scope, need.name.clone()));
            place.map_or(need.limit == 0, |place| place.taken >= place.limit)
        };
        needs.iter().find(is_full)
    }

    fn count_in(&mut self, tenant: &Arc<str>, needs: &[Need]) {
        for need in needs {
            let place = self.places.entry((need.scope, need.name.clone()));
            let place = place.or_insert(Place {
                taken: 0,
                limit: need.limit,
            });
            place.taken += 1;
        }
        *self.tenants.entry(tenant.clone()).or_default() += 1;
    }

    /// Lets a request run, if there is a place for it everywhere.
    ///
    /// # Errors
    /// The limit that is full.
    pub fn enter<'n>(&mut self, tenant: &Arc<str>, needs: &'n [Need]) -> Result<(), &'n Need> {
        for need in needs {
            if let Some(place) = self.places.get_mut(&(need.scope, need.name.clone())) {
                place.limit = need.limit;
            }
        }
        match self.lacking(needs) {
            Some(full) => Err(full),
            None => {
                self.count_in(tenant, needs);
                Ok(())
            }
        }
    }

    /// Lets a request wait that may not run now, behind at most `room` - 1 others.
    ///
    /// # Errors
    /// When as many wait already.
    pub fn wait(
        &mut self,
        (tenant, priority): (&Arc<str>, Priority),
        needs: Vec<Need>,
        room: usize,
    ) -> Result<Ticket, Full> {
        if self.waiting.len() >= room {
            return Err(Full);
        }
        self.last += 1;
        let ticket = Ticket(self.last);
        self.waiting.push(Waiter {
            ticket,
            priority,
            tenant: tenant.clone(),
            needs,
        });
        Ok(ticket)
    }

    /// A request has ended; answers who runs in its place, counted in already.
    pub fn leave(&mut self, tenant: &Arc<str>, needs: &[Need]) -> Vec<Ticket> {
        for need in needs {
            let key = (need.scope, need.name.clone());
            if let Some(place) = self.places.get_mut(&key) {
                place.taken -= 1;
                if place.taken == 0 {
                    self.places.remove(&key);
                }
            }
        }
        if let Some(count) = self.tenants.get_mut(tenant) {
            *count -= 1;
            if *count == 0 {
                self.tenants.remove(tenant);
            }
        }
        self.admit()
    }

    /// A request waits no longer. False when it was let in before: then it must leave.
    pub fn give_up(&mut self, ticket: Ticket) -> bool {
        let place = self.waiting.iter().position(|of| of.ticket == ticket);
        place.map(|at| self.waiting.swap_remove(at)).is_some()
    }

    fn admit(&mut self) -> Vec<Ticket> {
        let mut admitted = Vec::new();
        while let Some(at) = self.next() {
            let waiter = self.waiting.swap_remove(at);
            self.count_in(&waiter.tenant, &waiter.needs);
            admitted.push(waiter.ticket);
        }
        admitted
    }

    fn next(&self) -> Option<usize> {
        let able = self.waiting.iter().enumerate();
        let able = able.filter(|(_, of)| self.lacking(&of.needs).is_none());
        let first = able.min_by_key(|(_, of)| {
            let running = self.tenants.get(&of.tenant).copied().unwrap_or(0);
            (Reverse(of.priority), running, of.ticket)
        });
        first.map(|(at, _)| at)
    }

    /// Requests that run.
    pub fn running(&self) -> u32 {
        self.tenants.values().sum()
    }

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Entries that are kept for them: none of requests that have ended.
    pub fn entries(&self) -> usize {
        self.places.len() + self.tenants.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn need(scope: Scope, name: &str, limit: u32) -> Need {
        Need {
            scope,
            name: name.into(),
            limit,
        }
    }

    fn all(limit: u32) -> Vec<Need> {
        vec![need(Scope::Gateway, "", limit)]
    }

    fn name(tenant: &str) -> Arc<str> {
        tenant.into()
    }

    #[test]
    fn a_full_limit_is_named_and_takes_nothing_from_the_others() {
        let mut admission = Admission::default();
        let needs = vec![need(Scope::Gateway, "", 9), need(Scope::Key, "k", 1)];
        assert_eq!(admission.enter(&name("t"), &needs), Ok(()));
        assert_eq!(admission.enter(&name("t"), &needs), Err(&needs[1]));
        assert_eq!(admission.running(), 1);
        assert_eq!(admission.leave(&name("t"), &needs), []);
        assert_eq!((admission.running(), admission.entries()), (0, 0));
    }

    #[test]
    fn the_highest_priority_goes_first_then_the_tenant_with_the_fewest_running() {
        let mut admission = Admission::default();
        let (busy, idle) = (name("busy"), name("idle"));
        for _ in 0..3 {
            admission.enter(&busy, &all(3)).unwrap();
        }
        let mut wait =
            |tenant: &Arc<str>, priority| admission.wait((tenant, priority), all(3), 10).unwrap();
        let first_of_busy = wait(&busy, Priority::Normal);
        let of_idle = wait(&idle, Priority::Normal);
        let low = wait(&idle, Priority::Low);
        let high = wait(&busy, Priority::High);
        let mut order = Vec::new();
        for _ in 0..4 {
            order.extend(admission.leave(&busy, &all(3)));
        }
        assert_eq!(order, [high, of_idle, first_of_busy, low]);
    }

    #[test]
    fn the_queue_is_bounded_and_whoever_gives_up_makes_room() {
        let mut admission = Admission::default();
        let tenant = name("t");
        admission.enter(&tenant, &all(1)).unwrap();
        let normal = (&tenant, Priority::Normal);
        let first = admission.wait(normal, all(1), 1).unwrap();
        assert_eq!(admission.wait(normal, all(1), 1), Err(Full));
        assert!(admission.give_up(first));
        let second = admission.wait(normal, all(1), 1).unwrap();
        assert_eq!(admission.leave(&tenant, &all(1)), [second]);
        assert!(!admission.give_up(second), "it runs already");
    }

    #[test]
    fn limits_that_were_raised_hold_for_those_that_wait_already() {
        let mut admission = Admission::default();
        let tenant = name("t");
        for _ in 0..2 {
            admission.enter(&tenant, &all(2)).unwrap();
        }
        let normal = (&tenant, Priority::Normal);
        let waiting: Vec<Ticket> = (0..3)
            .map(|_| admission.wait(normal, all(2), 9).unwrap())
            .collect();
        admission.enter(&tenant, &all(5)).unwrap(); // one that knows of more
        assert_eq!(admission.leave(&tenant, &all(2)), waiting);
    }

    #[derive(Debug, Clone)]
    enum Step {
        Come(u8, u8, u8),
        End(usize),
        GiveUp(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (0u8..3, 0u8..3, 0u8..3).prop_map(|(t, m, p)| Step::Come(t, m, p)),
            2 => any::<usize>().prop_map(Step::End),
            1 => any::<usize>().prop_map(Step::GiveUp),
        ]
    }

    type Held = (Arc<str>, Vec<Need>);

    proptest! {
        /// No limit is exceeded, nobody waits while all that he needs is free, and nothing is left.
        #[test]
        fn limits_hold_and_nobody_waits_beside_a_free_place(
            steps in proptest::collection::vec(step(), 1..120)
        ) {
            let mut admission = Admission::default();
            let mut running: Vec<Held> = Vec::new();
            let mut waiting: Vec<(Ticket, Held)> = Vec::new();
            let let_in = |tickets: Vec<Ticket>, running: &mut Vec<Held>, waiting: &mut Vec<(Ticket, Held)>| {
                for ticket in tickets {
                    let at = waiting.iter().position(|(of, _)| *of == ticket).unwrap();
                    running.push(waiting.remove(at).1);
                }
            };
            for step in steps {
                match step {
                    Step::Come(tenant, model, priority) => {
                        let tenant: Arc<str> = format!("t{tenant}").into();
                        let needs = vec![
                            need(Scope::Gateway, "", 4),
                            need(Scope::Tenant, &tenant, 2),
                            need(Scope::Model, &format!("m{model}"), 3),
                        ];
                        let priority = [Priority::Low, Priority::Normal, Priority::High][usize::from(priority)];
                        if admission.enter(&tenant, &needs).is_ok() {
                            running.push((tenant, needs));
                        } else if let Ok(ticket) = admission.wait((&tenant, priority), needs.clone(), 8) {
                            waiting.push((ticket, (tenant, needs)));
                        }
                    }
                    Step::End(at) if !running.is_empty() => {
                        let (tenant, needs) = running.swap_remove(at % running.len());
                        let tickets = admission.leave(&tenant, &needs);
                        let_in(tickets, &mut running, &mut waiting);
                    }
                    Step::GiveUp(at) if !waiting.is_empty() => {
                        let (ticket, _) = waiting.swap_remove(at % waiting.len());
                        prop_assert!(admission.give_up(ticket));
                    }
                    _ => {}
                }
                prop_assert_eq!(admission.running() as usize, running.len());
                prop_assert_eq!(admission.waiting(), waiting.len());
                let used = |need: &Need| running.iter().flat_map(|(_, needs)| needs).filter(|of| of.scope == need.scope && of.name == need.name).count();
                for (_, needs) in &running {
                    prop_assert!(needs.iter().all(|need| used(need) <= need.limit as usize));
                }
                for (_, (_, needs)) in &waiting {
                    prop_assert!(needs.iter().any(|need| used(need) >= need.limit as usize));
                }
            }
            while let Some((tenant, needs)) = running.pop() {
                let tickets = admission.leave(&tenant, &needs);
                let_in(tickets, &mut running, &mut waiting);
            }
            prop_assert_eq!((admission.waiting(), admission.entries()), (0, 0));
        }
    }
}
