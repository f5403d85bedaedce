//! [`Expression`]: a policy in a line of text.
//!
//! ```text
//! policy  = clause { "," clause }
//! clause  = [ pattern ":" ] action            without a pattern, everything
//! action  = "recompute" | "rerun"
//!         | place [ "or" "recompute" ]        recomputed where the budget has no room for what the segment saves
//! place   = "keep"
//!         | "offload" [ codec ] [ "disk" ]    to host memory, or to disk
//!         | codec                             on the device, in fewer bytes
//! codec   = "raw" | "f16" | "bf16" | "bits" | "int8" [ "/64" | "/128" | "/256" ] [ "~" [ seed ] ]
//!                                             elements of a group; ~ for stochastic rounding
//! pattern = a glob over names of segments and tensors: * any text, ? one character, [ab] one of them,
//!           {a,b} either, 2-7 any of these numbers
//! ```
//!
//! What a segment gives by `or recompute` is what it would give in any case, if the place loses nothing; of a place that does, the bits
//! hang on which segments there was room for, and so on the budget.
//!
//! Of the clauses whose pattern matches the last wins; where none does, everything is kept. A pattern matches a tensor by its
//! own name (`h.3/attn/linear.input`) or by that of its segment (`h.3`). So `h.*: recompute, h.0-7: offload int8` recomputes
//! the blocks of a GPT-2 but for the first eight, which send what they save to the host as int8.
//!
//! Outputs of norms are nearly free to make again and always are; `rerun` makes those of activation functions again too.
//! Statistics are kept as they are.

use std::{
    collections::BTreeSet,
    fmt,
    str::FromStr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use globset::{Glob, GlobMatcher};

use crate::{
    Codec,
    policy::{Activation, Builtin, Placement, Policy, Role, SegmentPlan, Tier},
};

/// A policy in a line of text; see the module's docs for its grammar. Cloning is cheap; clones share what they have seen.
#[derive(Clone)]
pub struct Expression {
    text: String,
    clauses: Arc<[Clause]>,
    seen: Arc<Mutex<BTreeSet<String>>>,
}

struct Clause {
    pattern: String,
    matcher: GlobMatcher,
    action: Action,
    /// Its segments may be recomputed where there is no room.
    or_recompute: bool,
    used: AtomicBool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Keep(Codec),
    Offload(Tier, Codec),
    Recompute,
    Rerun,
}

impl Expression {
    /// Patterns that have matched no name since the expression was made, each with the nearest names there are. Ask when a
    /// step, real or dry, has run.
    pub fn unmatched(&self) -> Vec<(String, Vec<String>)> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let unused = self.clauses.iter().filter(|clause| !clause.used.load(Ordering::Relaxed));
        let nearest = |pattern: &str| {
            let mut names: Vec<&String> = seen.iter().collect();
            names.sort_by(|a, b| {
                strsim::jaro_winkler(pattern, b).total_cmp(&strsim::jaro_winkler(pattern, a))
            });
            names.into_iter().take(3).cloned().collect()
        };
        unused.map(|clause| (clause.pattern.clone(), nearest(&clause.pattern))).collect()
    }

    /// Whether gradients may differ from those of keeping everything.
    pub fn is_lossy(&self) -> bool {
        let lossy =
            |action| matches!(action, Action::Keep(codec) | Action::Offload(_, codec) if codec.is_lossy());
        self.clauses.iter().any(|clause| lossy(clause.action))
    }

    /// Whether anything may go to disk.
    pub fn uses_disk(&self) -> bool {
        self.clauses.iter().any(|clause| matches!(clause.action, Action::Offload(Tier::Disk, _)))
    }

    /// Whether anything may leave the device.
    pub fn offloads(&self) -> bool {
        self.clauses.iter().any(|clause| matches!(clause.action, Action::Offload(..)))
    }

    /// The action of the last clause that matches one of the names, and whether it may be recomputed instead.
    fn action(&self, names: [Option<&str>; 2]) -> (Action, bool) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        for name in names.into_iter().flatten() {
            if !seen.contains(name) {
                seen.insert(name.to_string());
            }
        }
        drop(seen);
        let mut action = (Action::Keep(Codec::Raw), false);
        for clause in self.clauses.iter() {
            if names.into_iter().flatten().any(|name| clause.matcher.is_match(name)) {
                clause.used.store(true, Ordering::Relaxed);
                action = (clause.action, clause.or_recompute);
            }
        }
        action
    }
}

impl Policy for Expression {
    fn activation(&self, activation: &Activation<'_>) -> Placement {
        let (action, _) = self.action([Some(activation.name), activation.segment]);
        match (activation.role, action) {
            (Role::NormOutput, _) | (Role::GeluOutput, Action::Rerun) => Placement::Rerun,
            (Role::Statistic, _) => Placement::Keep(Codec::Raw),
            (_, Action::Keep(codec)) => Placement::Keep(codec),
            (_, Action::Offload(tier, codec)) => Placement::Offload(tier, codec),
            (_, Action::Recompute | Action::Rerun) => Placement::Keep(Codec::Raw),
        }
    }

    fn segment(&self, name: &str) -> SegmentPlan {
        match self.action([Some(name), None]) {
            (Action::Recompute, _) => SegmentPlan::Recompute,
            (_, true) => SegmentPlan::RunIfRoom,
            _ => SegmentPlan::Run,
        }
    }
}

impl From<Builtin> for Expression {
    fn from(builtin: Builtin) -> Self {
        builtin.to_string().parse().unwrap_or_else(|error| unreachable!("a built-in policy's name: {error}"))
    }
}

impl Default for Expression {
    fn default() -> Self {
        Builtin::Keep.into()
    }
}

impl PartialEq for Expression {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl fmt::Debug for Expression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Expression({:?})", self.text)
    }
}

impl fmt::Display for Expression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for Expression {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let clauses: Result<Vec<Clause>, String> = split_outside_braces(text).map(clause).collect();
        let seen = Arc::default();
        Ok(Expression { text: text.trim().to_string(), clauses: clauses?.into(), seen })
    }
}

/// Commas in braces are alternatives of a glob.
fn split_outside_braces(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0i32;
    text.split(move |character| {
        depth += i32::from(character == '{') - i32::from(character == '}');
        character == ',' && depth <= 0
    })
}

fn clause(text: &str) -> Result<Clause, String> {
    let (pattern, action) = match text.rsplit_once(':') {
        Some((pattern, action)) => (pattern.trim(), action),
        None => ("*", text),
    };
    let matcher = Glob::new(&with_ranges(pattern)?)
        .map_err(|error| format!("`{pattern}` is not a pattern: {}", error.kind()))?
        .compile_matcher();
    let (action, or_recompute) = parse_action(action.trim())?;
    // What names everything cannot miss.
    let used = AtomicBool::new(pattern == "*");
    Ok(Clause { pattern: pattern.to_string(), matcher, action, or_recompute, used })
}

fn parse_action(text: &str) -> Result<(Action, bool), String> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let (words, or_recompute) = match &words[..] {
        [place @ .., "or", "recompute"] => (place, true),
        words => (words, false),
    };
    let action = match *words {
        ["recompute"] if !or_recompute => Action::Recompute,
        ["rerun"] if !or_recompute => Action::Rerun,
        ["keep"] => Action::Keep(Codec::Raw),
        ["offload"] => Action::Offload(Tier::Host, Codec::Raw),
        ["offload", "disk"] => Action::Offload(Tier::Disk, Codec::Raw),
        ["offload", codec] => Action::Offload(Tier::Host, codec.parse()?),
        ["offload", codec, "disk"] => Action::Offload(Tier::Disk, codec.parse()?),
        [codec] => Action::Keep(codec.parse().map_err(|_| unknown(text))?),
        _ => return Err(unknown(text)),
    };
    Ok((action, or_recompute))
}

fn unknown(action: &str) -> String {
    const WORDS: [&str; 10] =
        ["keep", "recompute", "rerun", "offload", "raw", "f16", "bf16", "bits", "int8", "disk"];
    let first = action.split_whitespace().next().unwrap_or_default();
    let near =
        WORDS.into_iter().filter(|word| *word != first && strsim::damerau_levenshtein(first, word) <= 2);
    let near = near.min_by_key(|word| strsim::damerau_levenshtein(first, word));
    let near = near.map_or(String::new(), |word| format!(", perhaps `{word}` is meant"));
    format!(
        "unknown policy `{action}`{near}: expected keep, recompute, rerun, offload [CODEC] [disk] or CODEC, each but recompute and rerun \
         perhaps with `or recompute` after it; a codec is raw, f16, bf16, bits, int8, int8/64 or int8/256"
    )
}

/// `2-7` as the alternatives `{2,3,4,5,6,7}` of a glob.
fn with_ranges(pattern: &str) -> Result<String, String> {
    /// A model has fewer layers.
    const MOST: usize = 10_000;
    let mut out = String::new();
    let mut rest = pattern;
    while let Some(start) = rest.find(|character: char| character.is_ascii_digit()) {
        let digits = |text: &str| text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let first = &rest[start..start + digits(&rest[start..])];
        let after = &rest[start + first.len()..];
        out.push_str(&rest[..start]);
        let last =
            after.strip_prefix('-').map(|after| &after[..digits(after)]).filter(|last| !last.is_empty());
        rest = match (first.parse::<usize>(), last.map(str::parse::<usize>)) {
            (Ok(low), Some(Ok(high))) => {
                if high < low || high - low >= MOST {
                    return Err(format!(
                        "`{pattern}`: expected a range from the lower number to the higher, of at most {MOST}, found {low}-{high}"
                    ));
                }
                let numbers: Vec<String> = (low..=high).map(|number| number.to_string()).collect();
                out.push_str(&format!("{{{}}}", numbers.join(",")));
                &after[1 + last.map_or(0, str::len)..]
            }
            _ => {
                out.push_str(first);
                after
            }
        };
    }
    Ok(out + rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(expression: &Expression, name: &str, segment: &str, role: Role) -> Placement {
        let segment = Some(segment);
        let dtype = ebbtide_kernels::DType::F32;
        expression.activation(&Activation { name, shape: &[], dtype, role, segment, rerun: true })
    }

    #[test]
    fn the_last_match_wins() {
        let policy: Expression = "h.*: recompute, h.0-7: offload int8, *attn*: f16".parse().unwrap();
        assert_eq!(policy.segment("h.8"), SegmentPlan::Recompute);
        assert_eq!(policy.segment("h.7"), SegmentPlan::Run);
        assert_eq!(policy.segment("h.17"), SegmentPlan::Recompute);
        let of = |name, segment| at(&policy, name, segment, Role::Activation);
        assert_eq!(of("h.3/mlp/linear.input", "h.3"), Placement::Offload(Tier::Host, Codec::INT8));
        assert_eq!(of("h.3/attn/linear.input", "h.3"), Placement::Keep(Codec::F16));
        assert_eq!(of("h.9/mlp/linear.input", "h.9"), Placement::Keep(Codec::Raw));
        assert_eq!(of("ln_f/input", "none"), Placement::Keep(Codec::Raw));
        assert_eq!(at(&policy, "h.3/mean", "h.3", Role::Statistic), Placement::Keep(Codec::Raw));
        assert_eq!(policy.unmatched(), []);
    }

    #[test]
    fn built_in_policies_are_expressions() {
        for builtin in Builtin::ALL {
            let (expression, policy) = (Expression::from(builtin), builtin.policy());
            assert_eq!(expression.segment("h.0"), policy.segment("h.0"));
            for role in
                [Role::Activation, Role::NormOutput, Role::GeluOutput, Role::Statistic, Role::Boundary]
            {
                let placed = at(&expression, "x", "y", role);
                let dtype = ebbtide_kernels::DType::F32;
                let activation =
                    Activation { name: "x", shape: &[], dtype, role, segment: None, rerun: true };
                assert_eq!(placed, policy.activation(&activation), "{builtin} {role:?}");
            }
        }
        let rerun: Expression = "rerun".parse().unwrap();
        assert_eq!(at(&rerun, "x", "y", Role::GeluOutput), Placement::Rerun);
        let both: Expression = "{a,b}.1-2: int8/64, c: offload bf16".parse().unwrap();
        assert_eq!(at(&both, "b.2", "", Role::Activation), Placement::Keep("int8/64".parse().unwrap()));
        assert_eq!(at(&both, "c", "", Role::Activation), Placement::Offload(Tier::Host, Codec::BF16));
        let disk: Expression = "offload disk, y: offload int8~7 disk or recompute".parse().unwrap();
        assert_eq!(at(&disk, "x", "z", Role::Activation), Placement::Offload(Tier::Disk, Codec::Raw));
        let stochastic = Codec::Int8 { group: 128, stochastic: Some(7) };
        assert_eq!(at(&disk, "x", "y", Role::Activation), Placement::Offload(Tier::Disk, stochastic));
        assert_eq!((disk.segment("y"), disk.segment("z")), (SegmentPlan::RunIfRoom, SegmentPlan::Run));
        assert!(disk.uses_disk() && disk.is_lossy() && !both.uses_disk());
    }

    #[test]
    fn what_matches_nothing_is_told_with_the_nearest_names() {
        let policy: Expression = "hh.3: offload, h.*: int8".parse().unwrap();
        for name in ["h.2", "h.3", "ln_f", "embedding"] {
            policy.segment(name);
        }
        let unmatched = policy.unmatched();
        assert_eq!(unmatched.len(), 1);
        assert_eq!((unmatched[0].0.as_str(), unmatched[0].1[0].as_str()), ("hh.3", "h.3"));
    }

    #[test]
    fn what_cannot_be_parsed_says_what_can() {
        for (text, expected) in [
            ("", "unknown policy ``"),
            ("forget", "keep, recompute"),
            ("h.*: offload int4", "unknown codec `int4`: expected raw, f16"),
            ("h.[: keep", "`h.[` is not a pattern"),
            ("h.7-2: keep", "`h.7-2`: expected a range from the lower number to the higher"),
            ("h.*: keep, ofload int8", "unknown policy `ofload int8`, perhaps `offload` is meant"),
            ("keep,", "unknown policy ``"),
            ("recompute or recompute", "unknown policy"),
            ("offload disk int8", "unknown policy"),
            ("offload int8~x", "~SEED"),
            ("f16~", "unknown policy"),
        ] {
            let error = text.parse::<Expression>().unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
