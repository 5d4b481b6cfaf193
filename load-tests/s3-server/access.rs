//! Who may do what: everything with the right signature, nothing without one, and nothing in a bucket that is not there. Left to
//! itself, `s3s-fs` makes a missing bucket with the first object.

use s3s::access::{S3Access, S3AccessContext};
use s3s::{S3Result, s3_error};
use std::path::PathBuf;

/// What file systems take for a name.
const FILE_NAME_MAX: usize = 255;

/// Bytes of the longest file name that `s3s-fs` makes for an object, in base64 without padding:
/// `.bucket-BUCKET.object-KEY.metadata.json`.
fn file_name_length(bucket: &str, key: &str) -> usize {
    let in_base64 = |text: &str| (text.len() * 4).div_ceil(3);
    ".bucket-.object-.metadata.json".len() + in_base64(bucket) + in_base64(key)
}

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
        if let Some((bucket, key)) = request.s3_path().as_object()
            && file_name_length(bucket, key) > FILE_NAME_MAX
        {
            let why = "bucket and key together are too long for the name of a file";
            return Err(s3_error!(KeyTooLongError, "{}", why)); // it would write the object and then fail
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_counted_as_they_stand_in_the_directory() {
        let name = ".bucket-cHJvZC1sbG0tcmVzcG9uc2UtY2FjaGU.object-cmVzcG9uc2UtY2FjaGUvdjEvdHJpYWwvNTU.metadata.json";
        let length = file_name_length("prod-llm-response-cache", "response-cache/v1/trial/55");
        assert_eq!(length, name.len());
    }
}
