package record

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// kindLen is the maximum length of an ErrorKind, in bytes.
const kindLen = 256

// ErrorKind returns the same text for errors that differ only in numbers, identifiers and quoted
// values: it replaces each word with a digit by "#", and quoted text by "?". White space becomes
// one space, and the text is cut after kindLen bytes.
func ErrorKind(text string) string {
	var b strings.Builder
	space := false
	for len(text) > 0 && b.Len() <= kindLen {
		r, n := utf8.DecodeRuneInString(text)
		switch {
		case unicode.IsSpace(r):
			space = b.Len() > 0
			text = text[n:]
			continue
		case space:
			space = false
			b.WriteByte(' ')
		}
		switch {
		case (r == '"' || r == '`') && strings.ContainsRune(text[n:], r):
			b.WriteString(string(r) + "?" + string(r))
			_, text, _ = strings.Cut(text[n:], string(r))
		case isWord(r):
			end := strings.IndexFunc(text, func(r rune) bool { return !isWord(r) })
			if end < 0 {
				end = len(text)
			}
			if word := text[:end]; strings.ContainsAny(word, "0123456789#") {
				b.WriteByte('#')
			} else {
				b.WriteString(word)
			}
			text = text[end:]
		default:
			b.WriteRune(r)
			text = text[n:]
		}
	}
	kind := b.String()
	if len(kind) > kindLen {
		kind = kind[:kindLen]
		for !utf8.ValidString(kind) {
			kind = kind[:len(kind)-1]
		}
	}
	return strings.TrimRight(kind, " ")
}

func isWord(r rune) bool { return unicode.IsLetter(r) || unicode.IsDigit(r) || r == '_' || r == '#' }
