//! NUMA: which nodes have memory, which node a segment belongs to, and the `mbind` call.
//!
//! **Invariant:** a pool is placed exactly as its policy says, or creation fails; on a machine with
//! one node a policy is a reported no-op.

use std::fs;

use crate::DataError;
use crate::segment::limits::SystemView;
use crate::segment::window::Window;

/// Where the pages of a pool are placed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum NumaPolicy {
    /// The kernel's default: near the allocating thread.
    #[default]
    Local,
    /// Pages of every segment alternate over all nodes that have memory.
    Interleave,
    /// Segment i lies wholly on the i-th node of this list, going round. Name the nodes near GPUs:
    /// no capacity is put elsewhere.
    Bind(Vec<u32>),
}

/// What became of the policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NumaOutcome {
    /// No policy was asked for.
    NotRequested,
    /// The machine has one memory node; there is nothing to place.
    SingleNode,
    /// Pages alternate over these nodes.
    Interleaved(Vec<u32>),
    /// Segments go round over these nodes.
    Bound(Vec<u32>),
}

impl NumaOutcome {
    /// Checks the policy against the machine.
    pub(crate) fn resolve(policy: &NumaPolicy, view: &SystemView) -> Result<Self, DataError> {
        let nodes = memory_nodes(view);
        match policy {
            NumaPolicy::Local => Ok(Self::NotRequested),
            NumaPolicy::Bind(wanted) => {
                if wanted.is_empty() {
                    return Err(DataError::invalid(
                        "numa: the list of nodes to bind to is empty; name at least one",
                    ));
                }
                if let Some(node) = wanted.iter().find(|node| !nodes.contains(node)) {
                    return Err(DataError::invalid(format!(
                        "numa: node {node} has no memory; nodes with memory are {nodes:?}"
                    )));
                }
                Ok(if nodes.len() == 1 { Self::SingleNode } else { Self::Bound(wanted.clone()) })
            }
            NumaPolicy::Interleave => {
                Ok(if nodes.len() == 1 { Self::SingleNode } else { Self::Interleaved(nodes) })
            }
        }
    }

    /// The one node of segment `index`, if it has one.
    pub(crate) fn node_of(&self, index: usize) -> Option<u32> {
        match self {
            Self::Bound(nodes) => nodes.get(index.checked_rem(nodes.len())?).copied(),
            _ => None,
        }
    }

    /// Applies the policy to a mapped segment whose pages are not allocated yet.
    pub(crate) fn apply(&self, window: &Window, index: usize) -> Result<(), DataError> {
        match (self, self.node_of(index)) {
            (Self::Interleaved(nodes), _) => window.mbind(libc::MPOL_INTERLEAVE, nodes),
            (_, Some(node)) => window.mbind(libc::MPOL_BIND, &[node]),
            _ => Ok(()),
        }
    }

    pub(crate) fn is_placed(&self) -> bool {
        matches!(self, Self::Interleaved(_) | Self::Bound(_))
    }
}

/// Nodes that have memory; `[0]` where the kernel does not say.
pub(crate) fn memory_nodes(view: &SystemView) -> Vec<u32> {
    ["has_memory", "online"]
        .into_iter()
        .filter_map(|name| {
            fs::read_to_string(view.path(&format!("sys/devices/system/node/{name}"))).ok()
        })
        .filter_map(|text| parse_list(text.trim()))
        .find(|nodes| !nodes.is_empty())
        .unwrap_or_else(|| vec![0])
}

/// `0-1,4` → 0, 1, 4.
fn parse_list(text: &str) -> Option<Vec<u32>> {
    let mut nodes = Vec::new();
    for part in text.split(',').filter(|p| !p.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if last >= 4096 {
            return None;
        }
        nodes.extend(first..=last);
    }
    Some(nodes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(has_memory: &str) -> (tempfile::TempDir, SystemView) {
        let dir = tempfile::tempdir().unwrap();
        let node = dir.path().join("sys/devices/system/node");
        fs::create_dir_all(&node).unwrap();
        fs::write(node.join("has_memory"), has_memory).unwrap();
        fs::write(node.join("online"), "0-5\n").unwrap();
        let view = SystemView::below(dir.path());
        (dir, view)
    }

    #[test]
    fn lists_are_parsed() {
        assert_eq!(parse_list("0-1,4"), Some(vec![0, 1, 4]));
        assert_eq!(parse_list("3"), Some(vec![3]));
        assert_eq!(parse_list(""), Some(vec![]));
        assert_eq!(parse_list("a-b"), None);
        assert_eq!(parse_list("0-4000000000"), None);
    }

    #[test]
    fn a20_segments_go_round_over_the_named_nodes_only() {
        let (_dir, view) = machine("0-3,5\n");
        assert_eq!(memory_nodes(&view), [0, 1, 2, 3, 5]);
        let outcome = NumaOutcome::resolve(&NumaPolicy::Bind(vec![1, 5]), &view).unwrap();
        let nodes: Vec<_> = (0..4).map(|i| outcome.node_of(i)).collect();
        assert_eq!(nodes, [Some(1), Some(5), Some(1), Some(5)]);
    }

    #[test]
    fn a20_a_node_without_memory_is_refused_by_name() {
        let (_dir, view) = machine("0-3,5\n");
        let error = NumaOutcome::resolve(&NumaPolicy::Bind(vec![0, 4]), &view).unwrap_err();
        assert!(error.to_string().contains("node 4"), "{error}");
        assert!(error.to_string().contains("[0, 1, 2, 3, 5]"), "{error}");
        assert!(NumaOutcome::resolve(&NumaPolicy::Bind(vec![]), &view).is_err());
    }

    #[test]
    fn one_node_is_a_reported_no_op() {
        let (_dir, view) = machine("0\n");
        for policy in [NumaPolicy::Interleave, NumaPolicy::Bind(vec![0])] {
            let outcome = NumaOutcome::resolve(&policy, &view).unwrap();
            assert_eq!(outcome, NumaOutcome::SingleNode);
            assert!(!outcome.is_placed());
        }
        let local = NumaOutcome::resolve(&NumaPolicy::Local, &view).unwrap();
        assert_eq!(local, NumaOutcome::NotRequested);
    }
}
