//! Cache of a gateway in a pod for the next start of its container, in memory that lasts as long as
//! the pod: the API server may be unavailable at that start.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use fabric_api::PrivateKey;
use fabric_api::fabric::GatewayConfig;
use fabric_store::ObjectRef;
use nix::sys::statfs::{TMPFS_MAGIC, statfs};

/// The last good config with the last status, and the private key's 32 bytes.
const CONFIG: &str = "config.json";
const KEY: &str = "key";

/// Directory of the cache. Cheap to clone.
#[derive(Clone, Debug)]
pub struct RestartCache {
    dir: PathBuf,
}

/// Reason why a directory cannot hold the cache.
#[derive(Debug, thiserror::Error)]
pub enum KeepError {
    #[error("cannot look at {}", path.display())]
    Look { path: PathBuf, source: nix::Error },
    #[error("{} is not in memory (tmpfs), and a private key is not to be written to a disk", .0.display())]
    Disk(PathBuf),
}

impl RestartCache {
    /// Opens the cache in `dir`, which has to be in memory (tmpfs).
    pub fn open(dir: PathBuf) -> Result<Self, KeepError> {
        let found = statfs(&dir);
        let found = found.map_err(|source| KeepError::Look { path: dir.clone(), source })?;
        if found.filesystem_type() != TMPFS_MAGIC {
            return Err(KeepError::Disk(dir));
        }
        Ok(Self { dir })
    }

    /// Returns the cached config and key of the gateway of that name.
    pub(crate) fn read(&self, name: &ObjectRef) -> Option<(GatewayConfig, PrivateKey)> {
        let config = fs::read(self.dir.join(CONFIG)).ok()?;
        let config: GatewayConfig = serde_json::from_slice(&config).ok()?;
        let key = PrivateKey::from_bytes(&fs::read(self.dir.join(KEY)).ok()?).ok()?;
        let metadata = &config.metadata;
        let is_its = metadata.name.as_ref() == Some(&name.name);
        (is_its && metadata.namespace == name.namespace).then_some((config, key))
    }

    /// Keeps the config and the key.
    pub fn put(&self, config: &GatewayConfig, key: &PrivateKey) -> io::Result<()> {
        write(&self.dir.join(KEY), key.expose())?;
        write(&self.dir.join(CONFIG), &serde_json::to_vec(config)?)
    }

    /// The peering is over.
    pub(crate) fn forget(&self) {
        for name in [CONFIG, KEY] {
            match fs::remove_file(self.dir.join(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(%error, "cannot forget the {name} that was kept");
                }
                Ok(()) | Err(_) => {}
            }
        }
    }
}

/// Readable by root alone, and never half.
fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let part = path.with_extension("part");
    let mut options = OpenOptions::new();
    let mut file: File = options.write(true).create(true).truncate(true).mode(0o600).open(&part)?;
    file.write_all(bytes)?;
    fs::rename(part, path)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use fabric_store::Kind;
    use tempfile::TempDir;

    use super::*;
    use crate::test_config::config;

    pub(crate) fn in_memory() -> (TempDir, RestartCache) {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let keep = RestartCache::open(dir.path().to_owned()).unwrap();
        (dir, keep)
    }

    #[test]
    fn cache_is_kept_until_its_peering_is_removed() {
        let (dir, keep) = in_memory();
        let name = ObjectRef::new(Kind::GatewayConfig, "liqo-tenant-milan", "client");
        assert!(keep.read(&name).is_none());
        let key = PrivateKey::generate();
        keep.put(&config(), &key).unwrap();
        keep.put(&config(), &key).unwrap();
        let (read, its) = keep.read(&name).unwrap();
        assert_eq!((read, its.expose()), (config(), key.expose()));
        let other = ObjectRef::new(Kind::GatewayConfig, "liqo-tenant-milan", "other");
        assert!(keep.read(&other).is_none());
        for file in fs::read_dir(dir.path()).unwrap() {
            let mode = file.unwrap().metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
        }
        keep.forget();
        assert!(keep.read(&name).is_none());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_disk_is_no_place_for_a_key() {
        let error = RestartCache::open("/proc".into()).unwrap_err().to_string();
        assert!(error.starts_with("/proc is not in memory"), "{error}");
        assert!(RestartCache::open("/nowhere".into()).is_err());
    }
}
