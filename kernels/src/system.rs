//! What the machine has to give.

use std::path::{Path, PathBuf};

/// Bytes of memory that the system still has to give to this process: what is free or can be freed, and no more than is left of
/// the limits of its control groups (version 1 and 2).
pub fn available_memory() -> usize {
    let mut system = sysinfo::System::new();
    system.refresh_memory();
    let of_system = usize::try_from(system.available_memory()).unwrap_or(usize::MAX);
    let of_process = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    left_in_groups(&of_process, Path::new("/sys/fs/cgroup")).map_or(of_system, |left| left.min(of_system))
}

/// The least that is left of a limit, of the process's group and those around it; `None` where there is no limit.
fn left_in_groups(of_process: &str, root: &Path) -> Option<usize> {
    // A line is `number:controllers:path`; version 2 names no controller.
    let lines = of_process.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        Some((fields.next()?, fields.next()?))
    });
    let mut left = Vec::new();
    for (controllers, path) in lines {
        let (root, limit, usage) = match controllers {
            "" => (root.to_path_buf(), "memory.max", "memory.current"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                (root.join("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes")
            }
            _ => continue,
        };
        let inner = root.join(path.trim_start_matches('/'));
        let groups = inner.ancestors().take_while(|group| group.starts_with(&root));
        left.extend(groups.filter_map(|group| left_in(group, limit, usage)));
    }
    left.into_iter().min()
}

fn left_in(group: &Path, limit: &str, usage: &str) -> Option<usize> {
    let read = |path: PathBuf| -> Option<usize> { std::fs::read_to_string(path).ok()?.trim().parse().ok() };
    // Pages of files can be given back.
    let statistics = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let files = statistics.lines().find_map(|line| {
        let (name, bytes) = line.split_once(' ')?;
        matches!(name, "file" | "total_cache").then(|| bytes.parse::<usize>().ok()).flatten()
    });
    let used = read(group.join(usage))?.saturating_sub(files.unwrap_or(0));
    Some(read(group.join(limit))?.saturating_sub(used))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_group_counts() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("memory.max", "max\n");
        write("outer/memory.max", "1000\n");
        write("outer/memory.current", "400\n");
        write("outer/memory.stat", "anon 300\nfile 100\n");
        write("outer/inner/memory.max", "5000\n");
        write("outer/inner/memory.current", "10\n");
        assert_eq!(left_in_groups("0::/outer/inner\n", root.path()), Some(700));
        assert_eq!(left_in_groups("0::/elsewhere\n", root.path()), None);
        write("memory/job/memory.limit_in_bytes", "2000\n");
        write("memory/job/memory.usage_in_bytes", "1500\n");
        write("memory/job/memory.stat", "cache 9\ntotal_cache 100\n");
        assert_eq!(left_in_groups("7:cpu,cpuacct:/job\n5:memory:/job\n", root.path()), Some(600));
        assert!(available_memory() > 0);
    }
}
