//! Who holds how many bytes, now and at the worst moment.

use std::{collections::HashMap, fmt};

/// What a device allocation is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Category {
    /// Parameters.
    Weights,
    /// Gradients of parameters.
    Gradients,
    /// Optimizer state.
    Optimizer,
    /// Values that forward computes, saved for backward or not.
    Activations,
    /// Gradients of activations and scratch.
    Workspace,
    /// Batches on their way in, results on their way out.
    Staging,
}

impl Category {
    /// All of them, in report order.
    pub const ALL: [Category; 6] = [
        Category::Weights,
        Category::Gradients,
        Category::Optimizer,
        Category::Activations,
        Category::Workspace,
        Category::Staging,
    ];

    fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Category::Weights => "weights",
            Category::Gradients => "gradients",
            Category::Optimizer => "optimizer",
            Category::Activations => "activations",
            Category::Workspace => "workspace",
            Category::Staging => "staging",
        })
    }
}

/// A device's memory at one moment, in bytes; allocations count with their padding to 256.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryReport {
    /// In use now, by [`Category::ALL`]'s order.
    pub current: [usize; 6],
    /// The most that each category held.
    pub peak: [usize; 6],
    /// In use now.
    pub current_bytes: usize,
    /// The most in use at once.
    pub peak_bytes: usize,
    /// By category, at the moment of `peak_bytes`.
    pub at_peak: [usize; 6],
    /// One past the highest device address ever used: what a budget must hold. At least `peak_bytes`; the difference is
    /// fragmentation.
    pub extent_bytes: usize,
    /// The budget; `None` if only the machine limits it.
    pub budget_bytes: Option<usize>,
    /// Allocations so far.
    pub allocations: u64,
    /// Host memory reserved for transfers, now.
    pub host_bytes: usize,
    /// Host memory reserved for transfers, at most.
    pub host_peak_bytes: usize,
}

impl MemoryReport {
    /// Bytes of a category now.
    pub fn current_of(&self, category: Category) -> usize {
        self.current[category.index()]
    }
    /// Most bytes of a category.
    pub fn peak_of(&self, category: Category) -> usize {
        self.peak[category.index()]
    }
    /// Bytes of a category at the moment of the peak.
    pub fn at_peak_of(&self, category: Category) -> usize {
        self.at_peak[category.index()]
    }
}

#[derive(Default)]
pub(crate) struct Ledger {
    report: MemoryReport,
    live: HashMap<u64, (String, Category, usize)>,
}

impl Ledger {
    pub(crate) fn add(&mut self, id: u64, name: &str, category: Category, bytes: usize) {
        self.live.insert(id, (name.to_string(), category, bytes));
        let report = &mut self.report;
        report.allocations += 1;
        let i = category.index();
        report.current[i] += bytes;
        report.peak[i] = report.peak[i].max(report.current[i]);
        report.current_bytes += bytes;
        if report.current_bytes > report.peak_bytes {
            report.peak_bytes = report.current_bytes;
            report.at_peak = report.current;
        }
    }

    pub(crate) fn remove(&mut self, id: u64) {
        if let Some((_, category, bytes)) = self.live.remove(&id) {
            self.report.current[category.index()] -= bytes;
            self.report.current_bytes -= bytes;
        }
    }

    pub(crate) fn add_host(&mut self, bytes: usize) {
        self.report.host_bytes += bytes;
        self.report.host_peak_bytes = self.report.host_peak_bytes.max(self.report.host_bytes);
    }

    pub(crate) fn remove_host(&mut self, bytes: usize) {
        self.report.host_bytes -= bytes;
    }

    pub(crate) fn in_use_bytes(&self) -> usize {
        self.report.current_bytes
    }

    pub(crate) fn reset_peaks(&mut self) {
        let report = &mut self.report;
        report.peak = report.current;
        report.at_peak = report.current;
        report.peak_bytes = report.current_bytes;
        report.host_peak_bytes = report.host_bytes;
    }

    pub(crate) fn report(&self) -> MemoryReport {
        self.report.clone()
    }

    /// Live allocations summed by name, the `count` largest first.
    pub(crate) fn largest(&self, count: usize) -> Vec<(String, usize)> {
        let mut by_name: HashMap<&str, usize> = HashMap::new();
        for (name, _, bytes) in self.live.values() {
            *by_name.entry(name).or_default() += bytes;
        }
        let mut all: Vec<(String, usize)> = by_name.into_iter().map(|(n, b)| (n.to_string(), b)).collect();
        all.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
        all.truncate(count);
        all
    }
}
