//! Where one engine leaves what another one fetches, and where the two wait for each other. Everything has a key, and a key is good
//! for one hand-off.

use crate::engine_client::Pin;
use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard};
use tokio::sync::watch;

/// Keys of past hand-offs that are remembered, so that a second use is noticed.
const GONE_MAX: usize = 65_536;

/// Keys and values of one prompt.
#[derive(Debug)]
pub struct Parcel {
    /// Which prompt ([`super::leg::Leg::content`]).
    pub content: u64,
    /// Its tokens.
    pub tokens: usize,
    /// What the blocks are called outside.
    pub block_ids: Vec<u64>,
    /// Keeps the blocks; none when they are elsewhere already.
    pub pin: Option<Pin>,
}

/// One engine's parcels.
#[derive(Debug)]
pub struct Depot {
    places: Mutex<Places>,
    changed: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct Places {
    by_key: HashMap<String, Place>,
    /// Keys whose place is `Gone`, oldest first.
    gone: VecDeque<String>,
}

#[derive(Debug)]
struct Place {
    content: Content,
    is_awaited: bool,
}

#[derive(Debug)]
enum Content {
    /// Somebody waits for it.
    Unknown,
    /// Somebody makes it.
    Promised,
    Ready(Parcel),
    /// For this reason nobody gets it.
    Gone(&'static str),
}

impl Default for Depot {
    fn default() -> Self {
        Self {
            places: Mutex::default(),
            changed: watch::Sender::new(()),
        }
    }
}

impl Depot {
    /// Announces a parcel.
    ///
    /// # Errors
    /// Why this key cannot be used (again).
    pub fn promise(&self, key: &str) -> Result<(), &'static str> {
        let mut places = self.places();
        let place = places.at(key);
        match place.content {
            Content::Unknown => {
                place.content = Content::Promised;
                Ok(())
            }
            Content::Gone(why) => Err(why),
            Content::Promised | Content::Ready(_) => Err("is in use already"),
        }
    }

    /// Leaves a parcel; false when the key is used up.
    pub fn offer(&self, key: &str, parcel: Parcel) -> bool {
        let mut places = self.places();
        let place = places.at(key);
        if let Content::Gone(_) | Content::Ready(_) = place.content {
            return false;
        }
        place.content = Content::Ready(parcel);
        drop(places);
        self.changed.send_replace(());
        true
    }

    /// What lies ready is gone from now on, with this reason. True when something lay there.
    pub fn withdraw(&self, key: &str, why: &'static str) -> bool {
        let mut places = self.places();
        let gone = places.end(key, why);
        drop(places);
        self.changed.send_replace(());
        matches!(gone, Some(Content::Ready(_)))
    }

    /// Waits until somebody waits for the parcel.
    pub async fn until_awaited(&self, key: &str) {
        let mut changes = self.changed.subscribe();
        while !self.places().at(key).is_awaited {
            let _ = changes.changed().await; // the sender is ours
        }
    }

    /// Fetches a parcel, as soon as it is there.
    ///
    /// # Errors
    /// Why there will be none.
    pub async fn take(&self, key: &str) -> Result<Parcel, &'static str> {
        let mut changes = self.changed.subscribe();
        let _waiting = self.wait_for(key)?;
        loop {
            let taken = self.places().take(key);
            if let Some(taken) = taken {
                return taken;
            }
            let _ = changes.changed().await; // the sender is ours
        }
    }

    /// What is said about a parcel that lies ready.
    pub fn peek<T>(&self, key: &str, look: impl FnOnce(&Parcel) -> T) -> Option<T> {
        match &self.places().by_key.get(key)?.content {
            Content::Ready(parcel) => Some(look(parcel)),
            _ => None,
        }
    }

    fn wait_for(&self, key: &str) -> Result<Waiting<'_>, &'static str> {
        let mut places = self.places();
        let place = places.at(key);
        if let Content::Gone(why) = place.content {
            return Err(why);
        }
        if place.is_awaited {
            return Err("is in use already");
        }
        place.is_awaited = true;
        drop(places);
        self.changed.send_replace(());
        Ok(Waiting {
            depot: self,
            key: key.to_owned(),
        })
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().expect("nobody panics with this lock")
    }
}

impl Places {
    fn at(&mut self, key: &str) -> &mut Place {
        self.by_key.entry(key.to_owned()).or_insert(Place {
            content: Content::Unknown,
            is_awaited: false,
        })
    }

    fn take(&mut self, key: &str) -> Option<Result<Parcel, &'static str>> {
        match self.at(key).content {
            Content::Unknown | Content::Promised => None,
            Content::Gone(why) => Some(Err(why)),
            Content::Ready(_) => match self.end(key, "was used before") {
                Some(Content::Ready(parcel)) => Some(Ok(parcel)),
                _ => None,
            },
        }
    }

    /// Answers what was there.
    fn end(&mut self, key: &str, why: &'static str) -> Option<Content> {
        let place = self.at(key);
        if let Content::Gone(_) = place.content {
            return None;
        }
        let before = std::mem::replace(&mut place.content, Content::Gone(why));
        self.gone.push_back(key.to_owned());
        if self.gone.len() > GONE_MAX
            && let Some(oldest) = self.gone.pop_front()
        {
            self.by_key.remove(&oldest);
        }
        Some(before)
    }
}

/// Somebody waits. One who leaves leaves no trace.
struct Waiting<'a> {
    depot: &'a Depot,
    key: String,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut places = self.depot.places();
        let place = places.at(&self.key);
        place.is_awaited = false;
        if let Content::Unknown = place.content {
            places.by_key.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use futures_util::FutureExt;

    fn parcel(content: u64) -> Parcel {
        Parcel {
            content,
            tokens: 1,
            block_ids: Vec::new(),
            pin: None,
        }
    }

    fn content(taken: Result<Parcel, &'static str>) -> Result<u64, &'static str> {
        taken.map(|parcel| parcel.content)
    }

    #[tokio::test]
    async fn who_comes_first_waits_for_the_other() {
        let depot = Depot::default();
        let maker = async {
            depot.promise("room").unwrap();
            depot.until_awaited("room").await;
            assert!(depot.offer("room", parcel(7)));
        };
        let (taken, ()) = tokio::join!(depot.take("room"), maker);
        assert_eq!(content(taken), Ok(7));
    }

    #[tokio::test]
    async fn a_key_is_good_for_one_hand_off() {
        let depot = Depot::default();
        assert!(depot.offer("key", parcel(1)));
        assert!(!depot.offer("key", parcel(2)));
        assert_eq!(content(depot.take("key").await), Ok(1));
        assert_eq!(content(depot.take("key").await), Err("was used before"));
        assert_eq!(depot.promise("key"), Err("was used before"));
    }

    #[tokio::test]
    async fn what_was_withdrawn_is_told_to_those_who_wait() {
        let depot = Depot::default();
        depot.promise("key").unwrap();
        let mut waiting = Box::pin(depot.take("key"));
        assert!(waiting.as_mut().now_or_never().is_none());
        assert!(!depot.withdraw("key", "has expired"));
        assert_eq!(content(waiting.await), Err("has expired"));
        assert!(!depot.offer("key", parcel(1)));
    }

    #[tokio::test]
    async fn who_leaves_leaves_no_trace() {
        let depot = Depot::default();
        assert!(depot.take("key").now_or_never().is_none());
        assert!(depot.places().by_key.is_empty());
    }
}
