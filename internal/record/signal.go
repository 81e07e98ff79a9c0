package record

import (
	"errors"
	"fmt"
	"unicode/utf8"

	"codeq/internal/wire"
)

// Signal is a signal that an unended task has got. It stays when the task has taken its value, so
// that a second one of its name is refused.
type Signal struct {
	Name  string
	At    uint64 // when it came, ms since 1970
	Size  uint32 // of its value, also of a taken one
	Taken bool
	Value []byte `json:",omitempty"` // until it is taken
}

// Signals are the signals of a task, in the order of their coming.
type Signals []Signal

// The bounds of the signals of a task, the taken ones included. A name has at most MaxStepName
// bytes.
const (
	MaxSignals     = 64
	MaxSignalBytes = 64 << 10 // of names and values
)

// Find returns the signal of a name; nil: there is none.
func (s Signals) Find(name string) *Signal {
	for i := range s {
		if s[i].Name == name {
			return &s[i]
		}
	}
	return nil
}

// Size returns the bytes that MaxSignalBytes limits.
func (s Signals) Size() (n int) {
	for i := range s {
		n += len(s[i].Name) + int(s[i].Size)
	}
	return n
}

// Take returns the value of a signal that has not been taken, and makes it a taken one.
func (s Signals) Take(name string) (value []byte, ok bool) {
	of := s.Find(name)
	if of == nil || of.Taken {
		return nil, false
	}
	value, of.Value, of.Taken = of.Value, nil, true
	return value, true
}

// TakenSignals returns the signals that a task has taken in some steps.
func TakenSignals(steps []Step) (s Signals) {
	for i := range steps {
		if of := &steps[i]; of.Kind == StepSignal {
			s = append(s, Signal{Name: of.Name, At: of.At, Size: uint32(len(of.Result)), Taken: true})
		}
	}
	return s
}

// Append appends the stored form.
func (s Signals) Append(b []byte) []byte {
	for i := range s {
		of := &s[i]
		b = wire.AppendUint(wire.AppendUint(wire.AppendBytes(b, of.Name), of.At), uint64(of.Size))
		if b = wire.AppendBool(b, of.Taken); !of.Taken {
			b = append(b, of.Value...)
		}
	}
	return b
}

// ParseSignals reads the result of Append. Values alias b.
func ParseSignals(b []byte) (s Signals, err error) {
	r := wire.NewReader(b)
	for r.Len() > 0 && !r.Failed() {
		of := Signal{Name: r.String(), At: r.Uint(), Size: r.Uint32(), Taken: r.Bool()}
		if !of.Taken && of.Size > 0 {
			of.Value = r.Take(int(of.Size))
		}
		s = append(s, of)
	}
	if r.Done() != nil || s.Sound() != nil {
		return nil, malformed(b)
	}
	return s, nil
}

// Sound returns an error if no shard stores such signals.
func (s Signals) Sound() error {
	if n, size := len(s), s.Size(); n == 0 || n > MaxSignals || size > MaxSignalBytes {
		return fmt.Errorf("%d signals of %d bytes", n, size)
	}
	for i := range s {
		of := &s[i]
		switch {
		case of.Name == "" || len(of.Name) > MaxStepName || !utf8.ValidString(of.Name):
			return fmt.Errorf("a signal with the name %q", Clip(of.Name, 2*MaxStepName))
		case of.Taken && len(of.Value) > 0, !of.Taken && len(of.Value) != int(of.Size):
			return errors.New("a signal with a value of another size")
		case s[:i].Find(of.Name) != nil:
			return fmt.Errorf("two signals with the name %q", of.Name)
		}
	}
	return nil
}
