//! PTX text cut into items: bodies opened and closed, labels, statements, each with its line and its `.loc`.

use crate::Error;
use crate::instruction::Place;
use std::collections::HashMap;

#[derive(Debug)]
pub(crate) enum Item {
    /// `.entry name(parameters) directives`, before its body.
    Entry(String),
    /// `.func …`, before its body.
    Function(String),
    Open,
    Close,
    Label(String),
    /// An instruction or a declaration, without the semicolon.
    Statement(String),
}

#[derive(Debug)]
pub(crate) struct Located {
    pub(crate) item: Item,
    /// Line of the PTX text, from 1.
    pub(crate) line: usize,
    pub(crate) place: Place,
}

/// The items of `ptx`, and the names of its source files.
pub(crate) fn split(ptx: &str) -> Result<(Vec<Located>, HashMap<u32, String>), Error> {
    let mut files = HashMap::new();
    let mut items = Vec::new();
    let mut place = Place::default();
    // A statement so far, and the line that it began in.
    let (mut text, mut start) = (String::new(), 1);
    for (index, full) in ptx.lines().enumerate() {
        let line = full.split("//").next().unwrap_or_default();
        let trimmed = line.trim();
        if trimmed.starts_with(".section") {
            break; // Debug data of the host's tools: nothing follows it.
        }
        // A word of its own: `.local` declares a variable.
        if let Some(rest) = trimmed.strip_prefix(".loc").filter(|rest| rest.starts_with([' ', '\t'])) {
            let mut words = rest.split([' ', '\t', ',']).filter(|word| !word.is_empty()).map(str::parse);
            let (Some(Ok(file)), Some(Ok(line))) = (words.next(), words.next()) else {
                return Err(Error::Text {
                    line: index + 1,
                    what: format!("expected `.loc file line column`, found {trimmed:?}"),
                });
            };
            // Line 0 is the compiler's own code: it belongs to what came before.
            place = if line == 0 { place } else { Place { file, line } };
            continue;
        }
        if let Some(rest) = trimmed.strip_prefix(".file") {
            let mut words = rest.trim().splitn(2, char::is_whitespace);
            if let (Some(Ok(number)), Some(name)) = (words.next().map(str::parse), words.next()) {
                files.insert(number, name.split('"').nth(1).unwrap_or(name).to_string());
            }
            continue;
        }
        if [".version", ".target", ".address_size"].iter().any(|directive| trimmed.starts_with(directive)) {
            continue;
        }
        if text.trim().is_empty() {
            start = index + 1;
        }
        let mut letters = line.chars().peekable();
        while let Some(letter) = letters.next() {
            let so_far = text.trim();
            let item = match letter {
                '{' if so_far.contains(".entry") => Some(Item::Entry(so_far.into())),
                '{' if so_far.contains(".func") => Some(Item::Function(so_far.into())),
                '{' if so_far.is_empty() => Some(Item::Open),
                '}' if so_far.is_empty() => Some(Item::Close),
                ';' => Some(Item::Statement(so_far.into())),
                ':' if letters.peek() == Some(&':') => {
                    letters.next();
                    text.push_str("::");
                    continue;
                }
                ':' if !so_far.contains(char::is_whitespace) => Some(Item::Label(so_far.into())),
                _ => None,
            };
            match item {
                None => text.push(letter),
                Some(Item::Statement(empty)) if empty.is_empty() => text.clear(),
                Some(item) => {
                    items.push(Located { item, line: start, place });
                    text.clear();
                    start = index + 1;
                }
            }
        }
        text.push(' ');
    }
    match text.trim() {
        "" => Ok((items, files)),
        rest => Err(Error::Text { line: start, what: format!("the text ends within {rest:?}") }),
    }
}

/// `text` cut at the commas that are not within braces, brackets or parentheses.
pub(crate) fn operands(text: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut from) = (Vec::new(), 0, 0);
    for (at, letter) in text.char_indices() {
        match letter {
            '{' | '[' | '(' => depth += 1,
            '}' | ']' | ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(text[from..at].trim());
                from = at + 1;
            }
            _ => {}
        }
    }
    parts.push(text[from..].trim());
    parts.retain(|part| !part.is_empty());
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_keep_vectors_and_addresses_whole() {
        assert_eq!(operands("{%f1, %f2}, [%rd1+8] , 0f3F800000"), ["{%f1, %f2}", "[%rd1+8]", "0f3F800000"]);
    }

    #[test]
    fn an_unfinished_statement_is_an_error_with_its_line() {
        let error = split(".version 9.0\n\nmov.u32 %r1, 2").unwrap_err();
        assert_eq!(error, Error::Text { line: 3, what: "the text ends within \"mov.u32 %r1, 2\"".into() });
    }

    #[test]
    fn a_local_variable_is_no_line() {
        let (items, _) = split(".entry k()\n{\n.loc\t1 7 3\n\t.local .align 16 .b8 \tdepot[16];\n}").unwrap();
        let expected = "Statement(\".local .align 16 .b8 \\tdepot[16]\")";
        assert_eq!(format!("{:?}", items[1].item), expected);
        assert_eq!((items[1].place, items[1].line), (Place { file: 1, line: 7 }, 4));
    }

    #[test]
    fn scopes_labels_and_lines_are_told_apart() {
        let (items, files) =
            split(".file 1 \"a/b.cu\"\n.entry k()\n{\n.loc 1 7 3\n$L: { mov.b32 %r1, {0,%rs5};}\n}").unwrap();
        let kinds: Vec<_> = items.iter().map(|located| format!("{:?}", located.item)).collect();
        let expected = [
            "Entry(\".entry k()\")",
            "Label(\"$L\")",
            "Open",
            "Statement(\"mov.b32 %r1, {0,%rs5}\")",
            "Close",
            "Close",
        ];
        assert_eq!(kinds, expected);
        assert_eq!((items[3].place, items[3].line), (Place { file: 1, line: 7 }, 5));
        assert_eq!(files[&1], "a/b.cu");
    }
}
