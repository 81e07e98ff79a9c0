package base

import (
	"fmt"
	"slices"
	"strings"
)

// Enum holds the texts of a type's values; a number without a text is not a value.
type Enum[T ~uint8] struct {
	Name  string // of the type
	Texts []string
	// Refuse makes the error of a value that is none.
	Refuse func(value any, limit string) error
}

// Marshal returns the text of a value.
func (e *Enum[T]) Marshal(v T) ([]byte, error) {
	if !e.Valid(v) {
		return nil, e.Refuse(uint8(v), e.Allowed())
	}
	return []byte(e.Texts[v]), nil
}

// Unmarshal reads what Marshal returns.
func (e *Enum[T]) Unmarshal(v *T, text []byte) error {
	read, ok := e.Parse(text)
	if !ok {
		return e.Refuse(fmt.Sprintf("%q", text), e.Allowed())
	}
	*v = read
	return nil
}

// Valid reports whether v is a value.
func (e *Enum[T]) Valid(v T) bool { return int(v) < len(e.Texts) && e.Texts[v] != "" }

// Text returns the text of a value, and the type with the number of anything else.
func (e *Enum[T]) Text(v T) string {
	if e.Valid(v) {
		return e.Texts[v]
	}
	return fmt.Sprintf("%s(%d)", e.Name, uint8(v))
}

// Parse returns the value with a text.
func (e *Enum[T]) Parse(text []byte) (v T, ok bool) {
	i := slices.Index(e.Texts, string(text))
	return T(max(i, 0)), i >= 0 && len(text) > 0
}

// Allowed returns all texts, such as "a, b or c".
func (e *Enum[T]) Allowed() string {
	texts := slices.DeleteFunc(slices.Clone(e.Texts), func(s string) bool { return s == "" })
	last := len(texts) - 1
	return strings.Join(texts[:last], ", ") + " or " + texts[last]
}
