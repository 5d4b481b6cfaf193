//! JSON as Python's `json.dumps` writes it with `ensure_ascii=False`: chat templates are written for
//! that, and a blank more or less makes other tokens.

use serde::Serialize;
use serde_json::ser::Formatter;
use std::io::{Result, Write};

/// One line, with a blank behind commas and colons; or, with an indent, lines.
pub(super) fn dumps(value: &impl Serialize, indent: Option<usize>) -> serde_json::Result<String> {
    let mut out = Vec::new();
    let style = Python {
        indent,
        depth: 0,
        empty: true,
    };
    value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, style))?;
    Ok(String::from_utf8(out).expect("serde_json writes UTF-8"))
}

struct Python {
    indent: Option<usize>,
    depth: usize,
    empty: bool,
}

impl Python {
    fn open<W: ?Sized + Write>(&mut self, out: &mut W, bracket: u8) -> Result<()> {
        self.depth += 1;
        self.empty = true;
        out.write_all(&[bracket])
    }

    fn close<W: ?Sized + Write>(&mut self, out: &mut W, bracket: u8) -> Result<()> {
        self.depth -= 1;
        if !self.empty {
            self.line(out)?;
        }
        self.empty = false;
        out.write_all(&[bracket])
    }

    fn line<W: ?Sized + Write>(&self, out: &mut W) -> Result<()> {
        match self.indent {
            Some(indent) => write!(out, "\n{:1$}", "", indent * self.depth),
            None => Ok(()),
        }
    }

    fn next<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> Result<()> {
        self.empty = false;
        match (first, self.indent) {
            (true, _) => {}
            (false, None) => out.write_all(b", ")?,
            (false, Some(_)) => out.write_all(b",")?,
        }
        self.line(out)
    }
}

impl Formatter for Python {
    fn begin_array<W: ?Sized + Write>(&mut self, out: &mut W) -> Result<()> {
        self.open(out, b'[')
    }
    fn end_array<W: ?Sized + Write>(&mut self, out: &mut W) -> Result<()> {
        self.close(out, b']')
    }
    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> Result<()> {
        self.next(out, first)
    }
    fn begin_object<W: ?Sized + Write>(&mut self, out: &mut W) -> Result<()> {
        self.open(out, b'{')
    }
    fn end_object<W: ?Sized + Write>(&mut self, out: &mut W) -> Result<()> {
        self.close(out, b'}')
    }
    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> Result<()> {
        self.next(out, first)
    }
    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> Result<()> {
        out.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn blanks_and_lines_are_where_python_puts_them() {
        let value = json!({"b": [1, 2.5, {}], "a": {"ü": "<é>\n"}, "e": []});
        assert_eq!(
            dumps(&value, None).unwrap(),
            r#"{"b": [1, 2.5, {}], "a": {"ü": "<é>\n"}, "e": []}"#
        );
        assert_eq!(
            dumps(&value, Some(2)).unwrap(),
            "{\n  \"b\": [\n    1,\n    2.5,\n    {}\n  ],\n  \"a\": {\n    \"ü\": \"<é>\\n\"\n  },\n  \"e\": []\n}"
        );
    }
}
