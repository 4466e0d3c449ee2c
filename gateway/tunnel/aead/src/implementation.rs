use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

/// Code that seals and opens batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Implementation {
    /// One message after the other. Works everywhere.
    Ring,
    Avx2,
    /// AVX-512 with its 52-bit multiplication (IFMA).
    Avx512,
}

/// The processor lacks the instructions of an implementation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unsupported(pub Implementation);

static FORCED: OnceLock<Implementation> = OnceLock::new();

impl Implementation {
    pub const ALL: [Self; 3] = [Self::Ring, Self::Avx2, Self::Avx512];

    /// Makes it the implementation of all keys made from now on, whatever is the fastest. The first
    /// call counts.
    pub fn force(self) -> Result<(), Unsupported> {
        if !self.is_supported() {
            return Err(Unsupported(self));
        }
        FORCED.get_or_init(|| self);
        Ok(())
    }

    pub(crate) fn forced() -> Option<Self> {
        FORCED.get().copied()
    }

    /// The fastest one that this processor supports.
    pub fn fastest() -> Self {
        match [Self::Avx512, Self::Avx2].into_iter().find(|one| one.is_supported()) {
            Some(fastest) => fastest,
            None => Self::Ring,
        }
    }

    #[cfg(target_arch = "x86_64")]
    pub fn is_supported(self) -> bool {
        match self {
            Self::Ring => true,
            Self::Avx2 => is_x86_feature_detected!("avx2"),
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512ifma")
            }
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub fn is_supported(self) -> bool {
        self == Self::Ring
    }
}

impl fmt::Display for Implementation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ring => "ring",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        })
    }
}

impl FromStr for Implementation {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = Self::ALL.into_iter();
        all.clone().find(|one| one.to_string() == text).ok_or_else(|| {
            let names: Vec<String> = all.map(|one| one.to_string()).collect();
            format!("found {text:?}, expected one of {}", names.join(", "))
        })
    }
}

impl std::error::Error for Unsupported {}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "this processor lacks the instructions of {}; ring works everywhere", self.0)
    }
}
