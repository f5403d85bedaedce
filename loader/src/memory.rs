//! How much memory there is to use.
//!
//! On Linux a process may be held to less than the machine has by control groups, of either version, at any level above
//! it. The least of all of them and of what the machine has free is what there is.

use std::fs;
use std::path::{Path, PathBuf};

/// Memory that may still be taken, and who says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    /// Bytes, `u64::MAX` where the system says nothing.
    pub bytes: u64,
    /// Where the number comes from.
    pub source: String,
}

/// What may still be taken: the least of the machine's available memory and of what each control group has left.
pub fn available() -> MemoryLimit {
    available_below(Path::new("/"))
}

/// The memory of this process that lies in the machine's, at most so far. `None` where the system does not say.
pub fn peak_resident_bytes() -> Option<u64> {
    kib_of(&fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

fn available_below(root: &Path) -> MemoryLimit {
    let mut least =
        MemoryLimit { bytes: u64::MAX, source: "the system says nothing of its memory".to_owned() };
    let meminfo = fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
    let machine =
        kib_of(&meminfo, "MemAvailable:").map(|bytes| (bytes, "the machine's available memory".to_owned()));
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let groups = groups.lines().filter_map(Group::parse).flat_map(|group| group.left(root));
    for (bytes, source) in machine.into_iter().chain(groups) {
        if bytes < least.bytes {
            least = MemoryLimit { bytes, source };
        }
    }
    least
}

/// A line of `NAME: NUMBER kB`.
fn kib_of(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// A control group of this process that may limit memory.
struct Group<'a> {
    /// Where its files are, below the root.
    mounts: &'static [&'static str],
    limit: &'static str,
    usage: &'static str,
    path: &'a str,
}

impl<'a> Group<'a> {
    /// From a line of `/proc/self/cgroup`: `NUMBER:CONTROLLERS:PATH`.
    fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        if controllers.is_empty() {
            let mounts = &["sys/fs/cgroup", "sys/fs/cgroup/unified"][..];
            return Some(Self { mounts, limit: "memory.max", usage: "memory.current", path });
        }
        controllers.split(',').any(|controller| controller == "memory").then_some(Self {
            mounts: &["sys/fs/cgroup/memory"],
            limit: "memory.limit_in_bytes",
            usage: "memory.usage_in_bytes",
            path,
        })
    }

    /// What this group and those above it have left. In a container the path may be the host's, so that only the mount's
    /// own files are there: they are the container's.
    fn left(&self, root: &Path) -> Vec<(u64, String)> {
        let mut left = Vec::new();
        for mount in self.mounts {
            let mount = root.join(mount);
            let folder = mount.join(self.path.trim_start_matches('/'));
            for folder in folder.ancestors().take_while(|folder| folder.starts_with(&mount)) {
                left.extend(self.left_of(folder));
            }
        }
        left
    }

    fn left_of(&self, folder: &Path) -> Option<(u64, String)> {
        let number = |path: PathBuf| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
        // A group without a limit says "max", or a number near 2^63 that the machine's own memory is below.
        let limit = number(folder.join(self.limit))?;
        let used = number(folder.join(self.usage)).unwrap_or(0);
        // The page cache counts as used and gives way.
        let cache = fs::read_to_string(folder.join("memory.stat")).ok().and_then(|stat| {
            let field =
                |name| stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
            field("inactive_file ").or_else(|| field("total_inactive_file "))
        });
        let used = used.saturating_sub(cache.unwrap_or(0));
        Some((limit.saturating_sub(used), format!("{} of {limit} bytes", folder.join(self.limit).display())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn system(files: &[(&str, &str)]) -> MemoryLimit {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let limit = available_below(root.path());
        MemoryLimit { source: limit.source.replace(&format!("{}/", root.path().display()), ""), ..limit }
    }

    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    4000 kB\n");

    #[test]
    fn the_machine_where_no_group_limits() {
        let machine = MemoryLimit { bytes: 4000 << 10, source: "the machine's available memory".to_owned() };
        assert_eq!(system(&[MEMINFO]), machine);
        assert_eq!(
            system(&[
                MEMINFO,
                ("proc/self/cgroup", "4:memory:/a/b\n0::/c\n"),
                ("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "9223372036854771712\n"),
                ("sys/fs/cgroup/unified/c/memory.max", "max\n"),
            ]),
            machine
        );
        assert_eq!(system(&[]).bytes, u64::MAX);
    }

    #[test]
    fn the_first_version_and_what_its_cache_gives_back() {
        let limit = system(&[
            MEMINFO,
            ("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/a/b\n"),
            ("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "3000000\n"),
            ("sys/fs/cgroup/memory/a/b/memory.usage_in_bytes", "1000000\n"),
            ("sys/fs/cgroup/memory/a/b/memory.stat", "cache 7\ntotal_inactive_file 400000\n"),
        ]);
        let source = "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes of 3000000 bytes".to_owned();
        assert_eq!(limit, MemoryLimit { bytes: 2_400_000, source });
    }

    #[test]
    fn the_second_version_and_the_groups_above() {
        let limit = system(&[
            MEMINFO,
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/memory.max", "2000000\n"),
            ("sys/fs/cgroup/a/memory.current", "2500000\n"),
        ]);
        assert_eq!(limit.bytes, 0);
        // Inside of a container the mount is the group.
        let limit =
            system(&[MEMINFO, ("proc/self/cgroup", "0::/host/x\n"), ("sys/fs/cgroup/memory.max", "7\n")]);
        assert_eq!(limit.bytes, 7);
    }
}
