//! Config that the node is to have: its NodeConfig, joined with the FabricRecords that it follows from.

use fabric_api::fabric::{FabricRecord, NodeConfig, RecordVersion, Records};

use crate::config_source::ConfigSource;

pub(crate) struct Desired {
    node: String,
    /// Directory that the config is published in, if it is one.
    source: ConfigSource,
    /// Config of the node as it is published, in whole or only its own part.
    published: Option<NodeConfig>,
    records: Records<FabricRecord>,
    /// Version of the records that was read last, and if the config follows from them, that it is of.
    version: Option<RecordVersion>,
    /// Config in whole.
    config: Option<NodeConfig>,
    /// The config was there, and cannot be read now.
    is_lost: bool,
}

/// Effect of joining what is published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Joined {
    /// Nothing new, or records are missing.
    Unchanged,
    /// Newer records, from which the same config follows.
    Version,
    /// A config of this generation that is to be applied.
    Config(Option<i64>),
}

impl Desired {
    pub(crate) fn new(node: String, source: ConfigSource) -> Self {
        let (published, records, version, config) = (None, Records::default(), None, None);
        Self { node, source, published, records, version, config, is_lost: false }
    }

    pub(crate) fn node(&self) -> &str {
        &self.node
    }

    pub(crate) fn config(&self) -> Option<&NodeConfig> {
        self.config.as_ref()
    }

    pub(crate) fn version(&self) -> Option<&RecordVersion> {
        self.version.as_ref()
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// True if there is a config, by which the node is part of the fabric.
    pub(crate) fn is_member(&self) -> bool {
        self.config.as_ref().is_some_and(|config| !config.spec.removed)
    }

    /// Takes in a published config. Returns it if it is this node's.
    pub(crate) fn publish(&mut self, config: NodeConfig) -> Option<&NodeConfig> {
        if config.metadata.name.as_ref() != Some(&self.node) {
            return None;
        }
        Some(self.published.insert(config))
    }

    pub(crate) fn insert_record(&mut self, record: FabricRecord) {
        self.records.insert(record);
    }

    pub(crate) fn remove_record(&mut self, name: &str) {
        self.records.remove(name);
    }

    /// Takes in that the node's config is gone. Returns whether it counts as lost from now on.
    pub(crate) fn unpublish(&mut self) -> bool {
        let spec = self.config.as_ref().map(|config| &config.spec);
        if spec.is_some_and(|spec| spec.removed && !spec.refused.is_empty()) {
            tracing::warn!(
                "this node is no longer one of the fabric; packets to peers stay refused while this agent runs"
            );
        } else {
            tracing::warn!("the NodeConfig is gone; keeping what is there");
        }
        self.published = None;
        self.check_source()
    }

    /// Joins what is published. While records are missing, the config stays as it is.
    pub(crate) fn join(&mut self) -> Joined {
        let joined = self.published.as_ref().and_then(|own| own.joined(&self.records));
        let Some(config) = joined else { return Joined::Unchanged };
        let version = self.records.version().or_else(|| self.version.clone());
        let has_read_more = self.version != version;
        self.version = version;
        let generation = config.metadata.generation;
        if self.replace(config) {
            Joined::Config(generation)
        } else if has_read_more {
            Joined::Version
        } else {
            Joined::Unchanged
        }
    }

    /// For one uid a lower generation is an old copy. A new status alone is no news.
    fn replace(&mut self, config: NodeConfig) -> bool {
        if let Some(current) = &self.config {
            let same = config.metadata.uid == current.metadata.uid;
            let (new, old) = (config.metadata.generation, current.metadata.generation);
            if same && (new < old || (new == old && config.spec == current.spec)) {
                return false;
            }
        }
        tracing::info!(generation = config.metadata.generation, "new config");
        self.config = Some(config);
        self.source.handle_read();
        self.check_source();
        true
    }

    /// Returns once [`Self::check_source`] may have another result.
    pub(crate) async fn source_changed(&mut self) {
        self.source.changed().await;
    }

    /// Returns whether the config was lost or came back. An API server that does not answer is no
    /// loss: it is on nobody's way, and its nodes' gateways report on their own. A published
    /// directory comes from the gateways' host, and nothing else shows that this is gone.
    pub(crate) fn check_source(&mut self) -> bool {
        let is_lost = self.is_member() && self.source.is_lost();
        std::mem::replace(&mut self.is_lost, is_lost) != is_lost
    }
}
