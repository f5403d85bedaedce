//! [`Expression`]: a policy in a line of text.
//!
//! ```text
//! policy  = clause { "," clause }
//! clause  = [ pattern ":" ] action            without a pattern, everything
//! action  = "keep" | "recompute" | "rerun"
//!         | "offload" [ codec ]               to host memory
//!         | codec                             on the device, in fewer bytes
//! codec   = "raw" | "f16" | "bf16" | "int8" | "int8/64" | "int8/256"
//! pattern = a glob over names of segments and tensors: * any text, ? one character, [ab] one of them,
//!           {a,b} either, 2-7 any of these numbers
//! ```
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
    policy::{Activation, Builtin, Placement, Policy, Role, SegmentPlan},
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
    used: AtomicBool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Keep(Codec),
    Offload(Codec),
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
            |action| matches!(action, Action::Keep(codec) | Action::Offload(codec) if codec.is_lossy());
        self.clauses.iter().any(|clause| lossy(clause.action))
    }

    /// The action of the last clause that matches one of the names.
    fn action(&self, names: [Option<&str>; 2]) -> Action {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        for name in names.into_iter().flatten() {
            if !seen.contains(name) {
                seen.insert(name.to_string());
            }
        }
        drop(seen);
        let mut action = Action::Keep(Codec::Raw);
        for clause in self.clauses.iter() {
            if names.into_iter().flatten().any(|name| clause.matcher.is_match(name)) {
                clause.used.store(true, Ordering::Relaxed);
                action = clause.action;
            }
        }
        action
    }
}

impl Policy for Expression {
    fn activation(&self, activation: &Activation<'_>) -> Placement {
        let action = self.action([Some(activation.name), activation.segment]);
        match (activation.role, action) {
            (Role::NormOutput, _) | (Role::GeluOutput, Action::Rerun) => Placement::Rerun,
            (Role::Statistic, _) => Placement::Keep(Codec::Raw),
            (_, Action::Keep(codec)) => Placement::Keep(codec),
            (_, Action::Offload(codec)) => Placement::Offload(codec),
            (_, Action::Recompute | Action::Rerun) => Placement::Keep(Codec::Raw),
        }
    }

    fn segment(&self, name: &str) -> SegmentPlan {
        match self.action([Some(name), None]) {
            Action::Recompute => SegmentPlan::Recompute,
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
    let matcher = Glob::new(&with_ranges(pattern))
        .map_err(|error| format!("`{pattern}` is not a pattern: {}", error.kind()))?
        .compile_matcher();
    let action = parse_action(action.trim())?;
    // What names everything cannot miss.
    let used = AtomicBool::new(pattern == "*");
    Ok(Clause { pattern: pattern.to_string(), matcher, action, used })
}

fn parse_action(text: &str) -> Result<Action, String> {
    let words: Vec<&str> = text.split_whitespace().collect();
    match words[..] {
        ["keep"] => Ok(Action::Keep(Codec::Raw)),
        ["recompute"] => Ok(Action::Recompute),
        ["rerun"] => Ok(Action::Rerun),
        ["offload"] => Ok(Action::Offload(Codec::Raw)),
        ["offload", codec] => codec.parse().map(Action::Offload),
        [codec] => codec.parse().map(Action::Keep).map_err(|_| unknown(text)),
        _ => Err(unknown(text)),
    }
}

fn unknown(action: &str) -> String {
    format!(
        "unknown policy `{action}`: expected keep, recompute, rerun, offload, offload CODEC or CODEC, where a codec is raw, \
         f16, bf16, int8, int8/64 or int8/256"
    )
}

/// `2-7` as the alternatives `{2,3,4,5,6,7}` of a glob.
fn with_ranges(pattern: &str) -> String {
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
            (Ok(low), Some(Ok(high))) if low <= high && high - low < MOST => {
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
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(expression: &Expression, name: &str, segment: &str, role: Role) -> Placement {
        let segment = Some(segment);
        expression.activation(&Activation { name, shape: &[], role, segment, rerun: true })
    }

    #[test]
    fn the_last_match_wins() {
        let policy: Expression = "h.*: recompute, h.0-7: offload int8, *attn*: f16".parse().unwrap();
        assert_eq!(policy.segment("h.8"), SegmentPlan::Recompute);
        assert_eq!(policy.segment("h.7"), SegmentPlan::Run);
        assert_eq!(policy.segment("h.17"), SegmentPlan::Recompute);
        let of = |name, segment| at(&policy, name, segment, Role::Activation);
        assert_eq!(of("h.3/mlp/linear.input", "h.3"), Placement::Offload(Codec::INT8));
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
                let activation = Activation { name: "x", shape: &[], role, segment: None, rerun: true };
                assert_eq!(
                    expression.activation(&activation),
                    policy.activation(&activation),
                    "{builtin} {role:?}"
                );
            }
        }
        let rerun: Expression = "rerun".parse().unwrap();
        assert_eq!(at(&rerun, "x", "y", Role::GeluOutput), Placement::Rerun);
        let both: Expression = "{a,b}.1-2: int8/64, c: offload bf16".parse().unwrap();
        assert_eq!(at(&both, "b.2", "", Role::Activation), Placement::Keep("int8/64".parse().unwrap()));
        assert_eq!(at(&both, "c", "", Role::Activation), Placement::Offload(Codec::BF16));
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
            ("keep,", "unknown policy ``"),
        ] {
            let error = text.parse::<Expression>().unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
