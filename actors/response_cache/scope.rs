//! Which cached answers are meant, by where they are kept: `v1/MODEL/TENANT/DIGEST`.

use std::sync::Arc;

/// See the module. Names are folders, as `routing::cache_key` makes them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// All.
    All,
    /// Those of a model.
    Model(Arc<str>),
    /// Those of a tenant, of all models.
    Tenant(Arc<str>),
    /// Those of a tenant and a model.
    ModelOfTenant {
        /// The model's folder.
        model: Arc<str>,
        /// The tenant's folder.
        tenant: Arc<str>,
    },
    /// One, by its path.
    Key(Arc<str>),
}

impl Scope {
    /// Before every path.
    pub const ALL_PREFIX: &'static str = "v1/";

    /// Whether a path is meant.
    pub fn holds(&self, path: &str) -> bool {
        let mut parts = path.split('/').skip(1);
        let (model, tenant) = (parts.next(), parts.next());
        match self {
            Scope::All => true,
            Scope::Model(name) => model == Some(name),
            Scope::Tenant(name) => tenant == Some(name),
            Scope::ModelOfTenant {
                model: m,
                tenant: t,
            } => model == Some(m) && tenant == Some(t),
            Scope::Key(key) => path == &**key,
        }
    }

    /// What exactly the paths that are meant begin with, if that tells them.
    pub fn prefix(&self) -> Option<String> {
        match self {
            Scope::All => Some(Self::ALL_PREFIX.into()),
            Scope::Model(model) => Some(format!("{}{model}/", Self::ALL_PREFIX)),
            Scope::ModelOfTenant { model, tenant } => {
                Some(format!("{}{model}/{tenant}/", Self::ALL_PREFIX))
            }
            Scope::Tenant(_) | Scope::Key(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scope_holds_what_its_names_say_and_nothing_that_merely_begins_alike() {
        let path = "v1/m-1/t1/abc";
        for (scope, holds) in [
            (Scope::All, true),
            (Scope::Model("m-1".into()), true),
            (Scope::Model("m".into()), false),
            (Scope::Tenant("t1".into()), true),
            (Scope::Tenant("t".into()), false),
            (
                Scope::ModelOfTenant {
                    model: "m-1".into(),
                    tenant: "t1".into(),
                },
                true,
            ),
            (
                Scope::ModelOfTenant {
                    model: "m-1".into(),
                    tenant: "t2".into(),
                },
                false,
            ),
            (Scope::Key(path.into()), true),
            (Scope::Key("v1/m-1/t1/ab".into()), false),
        ] {
            assert_eq!(scope.holds(path), holds, "{scope:?}");
            if let Some(prefix) = scope.prefix() {
                assert_eq!(path.starts_with(&prefix), holds, "{scope:?}");
            }
        }
    }
}
