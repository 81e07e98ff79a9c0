package record

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"unicode/utf8"

	"codeq/internal/wire"
)

// History holds the ended attempts of the task of a record. It is written with the end of an
// attempt, which rewrites the record anyway.
type History struct {
	// FirstReady is when the task had become ready for its first attempt, ms since 1970; 0: not
	// known.
	FirstReady uint64
	// Attempts are in their order: the first AttemptsKeptFirst, and the last ones.
	Attempts []Attempt
	Dropped  uint32 // how many are left out between them
}

// Attempt is an attempt that has ended.
type Attempt struct {
	Number uint32 // as its worker saw it: one that does not count has the number of the next one
	How    uint8  // it has ended: an event of the engine
	Start  uint64 // when its lease was granted, ms since 1970
	End    uint64 // not before Start
	Worker string // "": not known
	Error  string // its beginning
}

// The bounds of a history: it takes less than 4.5 KiB.
const (
	attemptsKept      = 10
	AttemptsKeptFirst = 2
	maxAttemptError   = 256 // bytes
	MaxWorker         = 128 // bytes
)

// Add adds an attempt, and drops one in the middle if they are too many.
func (h *History) Add(a Attempt) {
	a.Error, a.Worker = Clip(a.Error, maxAttemptError), Clip(a.Worker, MaxWorker)
	if len(h.Attempts) >= attemptsKept {
		h.Attempts = slices.Delete(h.Attempts, AttemptsKeptFirst, AttemptsKeptFirst+1)
		h.Dropped++
	}
	h.Attempts = append(h.Attempts, a)
}

// Fold makes an attempt that has ended like the last one a part of it, and returns false if it has
// not.
func (h *History) Fold(a Attempt) bool {
	if len(h.Attempts) == 0 || h.Attempts[len(h.Attempts)-1].How != a.How {
		return false
	}
	last := &h.Attempts[len(h.Attempts)-1]
	last.Number, last.End, last.Worker = a.Number, max(last.Start, a.End), Clip(a.Worker, MaxWorker)
	return true
}

// Last returns the last attempt. REQUIRES: there is one.
func (h *History) Last() *Attempt { return &h.Attempts[len(h.Attempts)-1] }

// Become changes how the attempt has ended.
func (a *Attempt) Become(how uint8, cause string) {
	a.How, a.Error = how, Clip(cause, maxAttemptError)
}

// MaxCause limits the text of an error that is kept with a task, in bytes.
const MaxCause = 8 << 10

// Clip returns at most n bytes of a text, and cuts no character.
func Clip(text string, n int) string {
	if len(text) <= n {
		return text
	}
	for n > 0 && !utf8.RuneStart(text[n]) {
		n--
	}
	return text[:n]
}

func (h *History) maxSize() int {
	n := 3 * binary.MaxVarintLen64
	for i := range h.Attempts {
		a := &h.Attempts[i]
		n += 1 + 5*binary.MaxVarintLen64 + len(a.Worker) + len(a.Error)
	}
	return n
}

// append appends the stored form. Times are differences to the one before.
func (h *History) append(b []byte) []byte {
	b = wire.AppendUint(wire.AppendUint(b, h.FirstReady), uint64(h.Dropped))
	b = wire.AppendUint(b, uint64(len(h.Attempts)))
	last := h.FirstReady
	for i := range h.Attempts {
		a := &h.Attempts[i]
		b = append(wire.AppendUint(b, uint64(a.Number)), a.How)
		b = wire.AppendInt(b, int64(a.Start-last))
		b = wire.AppendInt(b, int64(a.End-a.Start))
		b = wire.AppendBytes(wire.AppendBytes(b, a.Worker), a.Error)
		last = a.End
	}
	return b
}

// leastAttempt is how many bytes an attempt takes at least.
const leastAttempt = 6

func readHistory(r *wire.Reader) *History {
	h := &History{FirstReady: r.Uint(), Dropped: r.Uint32()}
	n := r.Count(leastAttempt)
	if n > 0 {
		h.Attempts = make([]Attempt, n)
	}
	last := h.FirstReady
	for i := range h.Attempts {
		a := &h.Attempts[i]
		a.Number, a.How = r.Uint32(), r.Byte()
		a.Start = last + uint64(r.Int())
		a.End = a.Start + uint64(r.Int())
		a.Worker, a.Error = r.String(), r.String()
		last = a.End
	}
	return h
}

// Notes are the reports of the handlers of a task on their work. They are never changed: a new
// report makes new Notes.
type Notes struct {
	Done, Total int64
	Text        string
	At          uint64            // when that was said, ms since 1970; 0: never
	Metadata    map[string]string // kept from attempt to attempt, like Logs
	Logs        []LogLine         `json:",omitempty"`
}

// SetMetadata sets a value of the metadata, which it copies; "" removes it.
func (n *Notes) SetMetadata(key, value string) {
	metadata := make(map[string]string, len(n.Metadata)+1)
	maps.Copy(metadata, n.Metadata)
	if metadata[key] = value; value == "" {
		delete(metadata, key)
	}
	n.Metadata = metadata
}

// OnlyLogs returns the logs, or nil; n may be nil.
func (n *Notes) OnlyLogs() *Notes {
	if n == nil || len(n.Logs) == 0 {
		return nil
	}
	return &Notes{Logs: n.Logs}
}

// After returns the notes, with the progress of earlier ones if they have none; earlier may be nil.
func (n *Notes) After(earlier *Notes) *Notes {
	if n.At != 0 || earlier == nil || earlier.At == 0 || n.Size()+len(earlier.Text) > MaxNotes {
		return n
	}
	c := *n
	c.Done, c.Total, c.Text, c.At = earlier.Done, earlier.Total, earlier.Text, earlier.At
	return &c
}

// MaxNotes limits the text and the metadata of notes: the bytes of all strings.
const MaxNotes = 4 << 10

// Size returns the bytes that MaxNotes limits.
func (n *Notes) Size() int {
	size := len(n.Text)
	for k, v := range n.Metadata {
		size += len(k) + len(v)
	}
	return size
}

func (n *Notes) maxSize() int {
	return n.Size() + 5*binary.MaxVarintLen64 + 2*binary.MaxVarintLen32*len(n.Metadata) + maxLogSize(n.Logs)
}

// Append appends the form that is stored, and sent between nodes, of all but the lines of the log.
// Equal notes have equal forms.
func (n *Notes) Append(b []byte) []byte {
	b = wire.AppendInt(wire.AppendInt(b, n.Done), n.Total)
	b = wire.AppendBytes(wire.AppendUint(b, n.At), n.Text)
	return appendMap(b, n.Metadata)
}

// ReadNotes reads the result of Append.
func ReadNotes(r *wire.Reader) *Notes {
	n := &Notes{Done: r.Int(), Total: r.Int(), At: r.Uint(), Text: r.String()}
	n.Metadata = readMap(r)
	return n
}

// Sound returns an error if the history, or the notes, are not such as a shard writes.
func (r *Record) Sound() error {
	if h := r.History; h != nil {
		if n := len(h.Attempts); n > attemptsKept || h.Dropped > 0 && n < attemptsKept {
			return fmt.Errorf("history of %d attempts, and %d that were dropped", n, h.Dropped)
		}
		if uint64(r.Leases) < uint64(len(h.Attempts))+uint64(h.Dropped) {
			return fmt.Errorf("history of %d attempts, %d of which were dropped, after %d leases",
				len(h.Attempts)+int(h.Dropped), h.Dropped, r.Leases)
		}
		for i := range h.Attempts {
			a := &h.Attempts[i]
			if a.Number == 0 || a.End < a.Start || len(a.Worker) > MaxWorker || len(a.Error) > maxAttemptError {
				return fmt.Errorf("attempt %+v of its history", *a)
			}
		}
	}
	if n := r.Notes; n != nil {
		if n.Size() > MaxNotes {
			return fmt.Errorf("notes of %d bytes", n.Size())
		}
		if err := SoundLogs(n.Logs); err != nil {
			return err
		}
	}
	return r.soundSteps()
}

func appendMap(b []byte, m map[string]string) []byte {
	b = wire.AppendUint(b, uint64(len(m)))
	for _, k := range slices.Sorted(maps.Keys(m)) {
		b = wire.AppendBytes(wire.AppendBytes(b, k), m[k])
	}
	return b
}

func readMap(r *wire.Reader) map[string]string {
	n := r.Count(2)
	m := make(map[string]string, n)
	for range n {
		k := r.String()
		m[k] = r.String()
	}
	return m
}
