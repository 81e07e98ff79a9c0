package codeq

import (
	"fmt"
	"slices"
	"strings"
)

// enum is the texts of a type's values; one without a text is not a value.
type enum[T ~uint8] struct {
	name  string // of the type
	texts []string
}

func (e *enum[T]) valid(v T) bool { return int(v) < len(e.texts) && e.texts[v] != "" }

// text returns the text of a value, and the type and number of anything else.
func (e *enum[T]) text(v T) string {
	if e.valid(v) {
		return e.texts[v]
	}
	return fmt.Sprintf("%s(%d)", e.name, uint8(v))
}

func (e *enum[T]) marshal(v T) ([]byte, error) {
	if !e.valid(v) {
		return nil, &InvalidError{e.name, uint8(v), e.allowed()}
	}
	return []byte(e.texts[v]), nil
}

func (e *enum[T]) unmarshal(v *T, text []byte) error {
	i := slices.Index(e.texts, string(text))
	if i < 0 || !e.valid(T(i)) {
		return &InvalidError{e.name, fmt.Sprintf("%q", text), e.allowed()}
	}
	*v = T(i)
	return nil
}

// allowed is all texts, such as "a, b or c".
func (e *enum[T]) allowed() string {
	texts := slices.DeleteFunc(slices.Clone(e.texts), func(s string) bool { return s == "" })
	last := len(texts) - 1
	return strings.Join(texts[:last], ", ") + " or " + texts[last]
}
