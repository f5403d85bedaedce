//! Mixed precision: which operation computes in which type. This table is all there is of it.
//!
//! Products and attention run in 16 bits where that is asked for, with f32 accumulation inside; norms, softmax and losses
//! compute in f32 whatever they are given and give; sums take the widest of what they add. Weights have f32 masters, which
//! norms and biases are read from directly, and one 16-bit copy of every matrix, made once an update. Gradients of weights
//! accumulate in f32, straight from products of 16-bit operands.
//!
//! A norm gives its result in 16 bits, since products are all that read it: the f32 result that is saved beside a 16-bit
//! copy elsewhere is never made.

use std::{fmt, str::FromStr};

use ebbtide_kernels::DType;
use serde::{Deserialize, Serialize};

/// What a model computes in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// IEEE 754 binary32 throughout.
    #[default]
    F32,
    /// IEEE 754 binary16 where the table says so: gradients need a loss scale.
    F16,
    /// bfloat16 where the table says so: f32's range at 8 bits of precision.
    BF16,
}

impl Precision {
    /// All of them.
    pub const ALL: [Precision; 3] = [Precision::F32, Precision::F16, Precision::BF16];

    /// The type of what the table makes narrow.
    pub fn dtype(self) -> DType {
        match self {
            Precision::F32 => DType::F32,
            Precision::F16 => DType::F16,
            Precision::BF16 => DType::BF16,
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.dtype())
    }
}

impl FromStr for Precision {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        Precision::ALL
            .into_iter()
            .find(|precision| precision.to_string() == text)
            .ok_or_else(|| format!("unknown precision `{text}`: expected f32, f16 or bf16"))
    }
}

/// How a model's numbers are held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Numerics {
    /// What it computes in.
    pub precision: Precision,
    /// Keeps the residual stream in f32: for models whose stream outgrows f16's 65,504, or bf16's 8 bits.
    pub residual_f32: bool,
}

/// What an operation's result is held in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// The narrow type.
    Narrow,
    /// The narrow type, unless the residual stream is kept in f32.
    Residual,
    /// f32.
    Full,
    /// The widest of its inputs' types.
    Widest,
    /// Its input's type.
    Input,
}

/// The operations by class. One that is not here keeps its input's type.
pub const TABLE: [(&str, Class); 9] = [
    ("linear", Class::Narrow),
    ("attention", Class::Narrow),
    ("logits", Class::Narrow),
    ("embedding", Class::Residual),
    ("norm", Class::Narrow),
    ("norm.statistics", Class::Full),
    ("attention.lse", Class::Full),
    ("losses", Class::Full),
    ("residual", Class::Widest),
];

impl Numerics {
    /// The type of an operation's result.
    pub fn result(self, operation: &str, inputs: &[DType]) -> DType {
        let class =
            TABLE.iter().find(|(name, _)| *name == operation).map_or(Class::Input, |(_, class)| *class);
        self.result_of(class, inputs)
    }

    /// The type of the result of an operation of a class.
    pub fn result_of(self, class: Class, inputs: &[DType]) -> DType {
        let narrow = self.precision.dtype();
        match class {
            Class::Narrow => narrow,
            Class::Residual if self.residual_f32 => DType::F32,
            Class::Residual => narrow,
            Class::Full => DType::F32,
            Class::Widest if inputs.contains(&DType::F32) => DType::F32,
            Class::Widest | Class::Input => inputs.first().copied().unwrap_or(DType::F32),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_says_what_runs_in_which_type() {
        let half = Numerics { precision: Precision::F16, residual_f32: false };
        let stream = Numerics { residual_f32: true, ..half };
        assert_eq!(half.result("linear", &[DType::F32]), DType::F16);
        assert_eq!(
            (half.result("embedding", &[]), stream.result("embedding", &[])),
            (DType::F16, DType::F32)
        );
        assert_eq!(stream.result("residual", &[DType::F32, DType::F16]), DType::F32);
        assert_eq!(half.result("residual", &[DType::F16, DType::F16]), DType::F16);
        assert_eq!(half.result("gelu", &[DType::BF16]), DType::BF16, "not in the table");
        assert_eq!(half.result("losses", &[DType::F16]), DType::F32);
        for (operation, _) in TABLE {
            assert_eq!(Numerics::default().result(operation, &[DType::F32]), DType::F32, "{operation}");
        }
        assert_eq!("bf16".parse(), Ok(Precision::BF16));
        assert!("fp16".parse::<Precision>().unwrap_err().contains("expected f32, f16 or bf16"));
    }
}
