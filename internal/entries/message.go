package entries

import (
	"bytes"
	"fmt"
	"time"

	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/wire"
)

// Message is the notifications of a group of operations.
type Message struct {
	Events   []engine.Event
	Endings  []engine.Ending
	Canceled []engine.Receipt // of leases
}

// EncodeEffects returns the message of a group for the log; nil if there is nothing to tell.
func EncodeEffects(f *engine.Effects) []byte {
	if len(f.Events)+len(f.Endings)+len(f.Canceled) == 0 {
		return nil
	}
	dst := wire.AppendUint(nil, uint64(len(f.Events)))
	for i := range f.Events {
		e := &f.Events[i]
		dst = append(append(dst, byte(e.Kind)), e.ID[:]...)
		dst = wire.AppendBytes(wire.AppendBytes(dst, e.Queue), e.Tenant)
		dst = wire.AppendInt(wire.AppendUint(dst, uint64(e.Attempt)), e.Time.UnixMilli())
		if e.Kind == engine.EventProgress {
			said := record.Notes{Done: e.Progress.Done, Total: e.Progress.Total, Text: e.Progress.Text, At: e.Progress.At}
			dst = wire.AppendBytes(dst, said.Append(nil))
		} else {
			dst = wire.AppendBytes(dst, e.LastError)
		}
	}
	dst = wire.AppendUint(dst, uint64(len(f.Endings)))
	for i := range f.Endings {
		e := &f.Endings[i]
		dst = AppendOutcome(append(dst, e.ID[:]...), &e.Outcome)
	}
	dst = wire.AppendUint(dst, uint64(len(f.Canceled)))
	for i := range f.Canceled {
		dst = call.AppendReceipt(dst, f.Canceled[i].Receipt)
	}
	return dst
}

// ParseMessage is the reverse of EncodeEffects. It returns an error that matches base.ErrCorrupt.
func ParseMessage(b []byte) (m Message, err error) {
	r := wire.NewReader(b)
	for range r.Count(1 + keys.IDLen + 5) {
		e := engine.Event{Kind: engine.EventKind(r.Byte()), ID: keys.ReadID(r), Queue: r.String(), Tenant: r.String()}
		e.Attempt, e.Time = uint32(r.Uint()), time.UnixMilli(r.Int()).UTC()
		if e.Kind == engine.EventProgress {
			said := wire.NewReader(r.Bytes())
			if e.Progress = record.ReadNotes(said); said.Done() != nil {
				r.Fail()
			}
		} else {
			e.LastError = r.String()
		}
		m.Events = append(m.Events, e)
	}
	for range r.Count(keys.IDLen + 4) {
		m.Endings = append(m.Endings, engine.Ending{ID: keys.ReadID(r), Outcome: ReadOutcome(r)})
	}
	m.Canceled = call.ReadReceipts(r)
	if err := r.Done(); err != nil {
		return Message{}, fmt.Errorf("%w: broadcast of a log entry: %w", base.ErrCorrupt, err)
	}
	return m, nil
}

// Await waits for the end of a task.
type Await struct {
	ID      keys.ID
	Outcome engine.Outcome
}

func (b *Await) Append(dst []byte) []byte      { return append(dst, b.ID[:]...) }
func (b *Await) Read(r *wire.Reader)           { b.ID = keys.ReadID(r) }
func (b *Await) AppendReply(dst []byte) []byte { return AppendOutcome(dst, &b.Outcome) }
func (b *Await) ReadReply(r *wire.Reader)      { b.Outcome = ReadOutcome(r) }
func (b *Await) Again()                        {}

// AppendOutcome appends an outcome.
func AppendOutcome(dst []byte, o *engine.Outcome) []byte {
	dst = wire.AppendBytes(append(dst, byte(o.State)), o.Result)
	return wire.AppendUint(wire.AppendBytes(dst, o.LastError), uint64(o.Attempts))
}

// ReadOutcome reads an outcome that shares no memory with the message.
func ReadOutcome(r *wire.Reader) engine.Outcome {
	o := engine.Outcome{State: engine.TaskState(r.Byte())}
	if b := r.Bytes(); len(b) > 0 {
		o.Result = bytes.Clone(b)
	}
	o.LastError, o.Attempts = r.String(), int(r.Uint())
	return o
}

// CloneOutcome returns an outcome that shares no memory with o.
func CloneOutcome(o *engine.Outcome) engine.Outcome {
	c := *o
	c.Result = append([]byte(nil), o.Result...)
	return c
}
