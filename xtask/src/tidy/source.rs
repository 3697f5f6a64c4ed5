//! Rust source without its comments or texts, as far as the checks need it.
//!
//! Owns: a small lexer for comments, string and character literals.
//! **Invariant:** what is cut out never contains code, and nothing but comments (and, if asked,
//! the insides of literals) is cut out.

/// What remains of a source file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Keep {
    /// Code with its literals.
    Literals,
    /// Code with empty literals, so that words can be searched.
    CodeOnly,
}

/// The code of `source` without comments; runs of white space become one space.
pub(super) fn code(source: &str, keep: Keep) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(first) = rest.chars().next() {
        let before = out.chars().next_back();
        let length = if rest.starts_with("//") {
            push_space(&mut out);
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            push_space(&mut out);
            block_comment(rest)
        } else if let Some((open, length)) = literal(rest, before) {
            let text = rest.get(..length).unwrap_or(rest);
            match keep {
                Keep::Literals => out.push_str(text),
                Keep::CodeOnly => out.push_str(open),
            }
            length
        } else {
            if first.is_whitespace() {
                push_space(&mut out)
            } else {
                out.push(first)
            }
            first.len_utf8()
        };
        rest = rest.get(length..).unwrap_or("");
    }
    out.trim().to_owned()
}

/// Does `word` stand in `code` as a whole word?
pub(super) fn has_word(code: &str, word: &str) -> bool {
    code.split(|c: char| !(c.is_alphanumeric() || c == '_')).any(|part| part == word)
}

fn push_space(out: &mut String) {
    if !out.ends_with(' ') {
        out.push(' ');
    }
}

fn block_comment(text: &str) -> usize {
    let (mut depth, mut at) = (0_u32, 0);
    while let Some(rest) = text.get(at..).filter(|rest| !rest.is_empty()) {
        if rest.starts_with("/*") {
            depth += 1;
            at += 2;
        } else if rest.starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += rest.chars().next().map_or(1, char::len_utf8);
        }
    }
    text.len()
}

/// If a literal starts here: what stands for it when emptied, and its length in bytes.
fn literal(text: &str, before: Option<char>) -> Option<(&'static str, usize)> {
    let in_word = before.is_some_and(|c| c.is_alphanumeric() || c == '_');
    if text.starts_with('"') {
        return Some(("\"\"", 1 + quoted(text.get(1..)?, '"')));
    }
    if let Some(length) = char_literal(text) {
        return Some(("' '", length));
    }
    if in_word {
        return None;
    }
    for prefix in ["b", "c"] {
        match text.strip_prefix(prefix) {
            Some(rest) if rest.starts_with('"') => {
                return Some(("\"\"", 2 + quoted(rest.get(1..)?, '"')));
            }
            Some(rest) if prefix == "b" && rest.starts_with('\'') => {
                return Some(("' '", 1 + char_literal(rest)?));
            }
            _ => {}
        }
    }
    for prefix in ["r", "br", "cr"] {
        let Some(rest) = text.strip_prefix(prefix) else { continue };
        let hashes = rest.bytes().take_while(|byte| *byte == b'#').count();
        if rest.get(hashes..).is_some_and(|rest| rest.starts_with('"')) {
            let end = format!("\"{}", "#".repeat(hashes));
            let start = prefix.len() + hashes + 1;
            let body = text.get(start..)?;
            let length = body.find(&end).map_or(text.len(), |at| start + at + end.len());
            return Some(("\"\"", length));
        }
    }
    None
}

/// Bytes up to and with the closing quote.
fn quoted(text: &str, close: char) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if c == close => return at + c.len_utf8(),
            _ => {}
        }
    }
    text.len()
}

/// The length of a character literal; `None` for a lifetime.
fn char_literal(text: &str) -> Option<usize> {
    let body = text.strip_prefix('\'')?;
    let first = body.chars().next()?;
    if first == '\\' {
        return Some(1 + quoted(body, '\''));
    }
    body.get(first.len_utf8()..)?.starts_with('\'').then(|| 2 + first.len_utf8())
}

#[cfg(test)]
mod tests {
    use super::{Keep, code, has_word};

    #[test]
    fn comments_go_and_code_stays() {
        let source = "//! unsafe\nfn a() {} // unsafe\n/* unsafe /* nested */ unsafe */ fn b() {}";
        assert_eq!(code(source, Keep::CodeOnly), "fn a() {} fn b() {}");
        assert_eq!(code("a / b * c", Keep::CodeOnly), "a / b * c");
    }

    #[test]
    fn literals_are_recognised() {
        let source = r##"f("unsafe \" // x", 'a', '\'', b'"', b"unsafe", r#"un"safe"#, '"', x)"##;
        let bare = code(source, Keep::CodeOnly);
        assert_eq!(bare, r#"f("", ' ', ' ', ' ', "", "", ' ', x)"#);
        assert_eq!(code(source, Keep::Literals), source);
        let lifetimes = "impl<'a> X<'a> { fn f(&'a self) -> &'static str { unsafe { y } } }";
        assert_eq!(code(lifetimes, Keep::CodeOnly), lifetimes);
        assert_eq!(code("\"ends // not", Keep::CodeOnly), "\"\"");
    }

    #[test]
    fn words_are_whole() {
        assert!(has_word("x = unsafe{y}", "unsafe"));
        assert!(has_word("#[unsafe(no_mangle)]", "unsafe"));
        assert!(!has_word("#![forbid(unsafe_code)]", "unsafe"));
    }
}
