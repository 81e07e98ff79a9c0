package codeqweb

import (
	"strings"
	"time"

	"codeq"
)

// word is a part of a sentence: one of its fields is set.
type word struct {
	Text  string
	Name  string    // untrusted
	Queue string    // a link
	ID    codeq.ID  // a link
	State string    //
	At    time.Time // shown as the distance from now
	Since time.Time // shown as the time since then
}

// sentence says something about a task, with links.
type sentence []word

// say makes a sentence of strings, which are trusted, and words.
func say(parts ...any) (s sentence) {
	for _, p := range parts {
		switch p := p.(type) {
		case string:
			if p != "" {
				s = append(s, word{Text: p})
			}
		case codeq.ID:
			s = append(s, word{ID: p})
		case codeq.State:
			s = append(s, word{State: p.String()})
		case time.Time:
			s = append(s, word{At: p})
		case word:
			s = append(s, p)
		case sentence:
			s = append(s, p...)
		}
	}
	return s
}

func name(text string) word   { return word{Name: text} }
func since(at time.Time) word { return word{Since: at} }
func queueOf(q string) word   { return word{Queue: q} }
func (w word) IsLink() bool   { return w.ID != codeq.ID{} }
func (w word) IsQueue() bool  { return w.Queue != "" }
func (w word) HasTime() bool  { return !w.At.IsZero() }
func (w word) IsSpan() bool   { return !w.Since.IsZero() }

// String returns the sentence without links.
func (s sentence) String() string {
	var b strings.Builder
	for _, w := range s {
		switch {
		case w.IsLink():
			b.WriteString(w.ID.String())
		case w.HasTime():
			b.WriteString(distance(w.At))
		case w.IsSpan():
			b.WriteString(age(w.Since))
		default:
			b.WriteString(w.Text + line(w.Name) + line(w.Queue) + w.State)
		}
	}
	return b.String()
}
