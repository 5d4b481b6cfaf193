//! Who may do what: everything with the right signature, nothing without one, and nothing in a bucket that is not there. Left to
//! itself, `s3s-fs` makes a missing bucket with the first object.

use s3s::access::{S3Access, S3AccessContext};
use s3s::{S3Result, s3_error};
use std::path::PathBuf;

/// The check of every request.
pub(crate) struct ExistingBuckets {
    /// Where buckets are kept.
    pub(crate) root: PathBuf,
}

#[async_trait::async_trait]
impl S3Access for ExistingBuckets {
    async fn check(&self, request: &mut S3AccessContext<'_>) -> S3Result<()> {
        if request.credentials().is_none() {
            return Err(s3_error!(AccessDenied, "Signature is required"));
        }
        let making = request.s3_op().name() == "CreateBucket";
        match request.s3_path().get_bucket_name() {
            Some(bucket) if !making && !self.root.join(bucket).is_dir() => {
                Err(s3_error!(NoSuchBucket))
            }
            _ => Ok(()),
        }
    }
}
