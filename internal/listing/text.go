package listing

import (
	"unicode/utf8"

	"codeq/internal/keys"
	"codeq/internal/store"
)

// Search selects tasks with a text. Its ASCII letters match in either case.
type Search struct {
	Text string // "": any task
	// Contents: payloads, results, headers and metadata are searched, too.
	Contents bool

	lower []byte // Text in lower case, once it is needed
}

const maxText = 256 // bytes

// IsValid reports whether the text has an allowed length.
func (s *Search) IsValid() bool { return len(s.Text) <= maxText && (s.Text != "" || !s.Contents) }

// finds reports whether a task has the text. encoded: it has not, but its payload or result is no
// text, and was not searched.
func (s *Search) finds(t *store.Task) (found, encoded bool) {
	if s.Text == "" {
		return true, false
	}
	if s.lower == nil {
		s.lower = []byte(s.Text)
		for i, c := range s.lower {
			s.lower[i] = lowerOf[c]
		}
	}
	r := &t.Record
	for _, text := range [...]string{keys.FormatID(t.ID), t.Lane.Tenant, r.Kind, r.GroupKey, r.LimitKey, r.UniqueKey, r.Error} {
		if isPart(s.lower, text) {
			return true, false
		}
	}
	if !s.Contents {
		return false, false
	}
	notes := r.Notes
	if t.Lease != nil && t.Lease.Notes != nil {
		notes = t.Lease.Notes
	}
	if isInMap(s.lower, r.Headers) || notes != nil && isInMap(s.lower, notes.Metadata) {
		return true, false
	}
	return s.findsIn(r.Payload, t.Ended.Result)
}

func (s *Search) findsIn(contents ...[]byte) (found, encoded bool) {
	for _, b := range contents {
		if !utf8.Valid(b) {
			encoded = true
		} else if isPart(s.lower, b) {
			return true, false
		}
	}
	return false, encoded
}

func isInMap(lower []byte, texts map[string]string) bool {
	for name, value := range texts {
		if isPart(lower, name) || isPart(lower, value) {
			return true
		}
	}
	return false
}

// isPart reports whether a text has a part, which is in lower case and not empty.
func isPart[T string | []byte](lower []byte, text T) bool {
	for at := 0; at+len(lower) <= len(text); at++ {
		n := 0
		for n < len(lower) && lowerOf[text[at+n]] == lower[n] {
			n++
		}
		if n == len(lower) {
			return true
		}
	}
	return false
}

// lowerOf has the lower case of each byte that is an ASCII letter, and each other one itself.
var lowerOf = func() (lower [256]byte) {
	for c := range lower {
		if lower[c] = byte(c); 'A' <= c && c <= 'Z' {
			lower[c] += 'a' - 'A'
		}
	}
	return lower
}()
