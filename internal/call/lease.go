package call

import (
	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/wire"
)

// Complete completes a task.
type Complete struct {
	Silent
	RoomWait
	Receipt   engine.Receipt
	Notes     *record.Notes // of the handler; nil: none
	Result    []byte        // in memory of the call
	Next      []engine.NewTask
	Retention int64 // of a task that has none, ms; negative: for ever
	StillRuns bool  // the handler, or it may; not if its outcome is this one
}

func (b *Complete) Append(dst []byte) []byte {
	flags := byte(0)
	if b.WaitsForRoom() {
		flags |= 1
	}
	if b.StillRuns {
		flags |= 2
	}
	if b.Retention != 0 {
		flags |= 4
	}
	dst = append(AppendReceipt(dst, b.Receipt), flags)
	if b.Retention != 0 {
		dst = wire.AppendInt(dst, b.Retention)
	}
	dst = wire.AppendBytes(dst, b.Result)
	return appendLastNotes(appendTasks(dst, b.Next), b.Notes)
}

func (b *Complete) Read(r *wire.Reader) {
	b.Receipt = readReceipt(r)
	flags := r.Byte()
	if flags > 7 {
		r.Fail()
	}
	b.setWaits(flags&1 != 0)
	b.StillRuns = flags&2 != 0
	if flags&4 != 0 {
		b.Retention = r.Int()
	}
	b.Result, b.Next, b.Notes = r.Bytes(), readTasks(r), readLastNotes(r)
}

// Fail ends a lease without a completion.
type Fail struct {
	Silent
	RoomWait
	Receipt engine.Receipt
	How     engine.Failure
	Wait    int64 // ms; negative: by the backoff
	Cause   string
	Notes   *record.Notes  // of the handler; nil: none
	Policy  *record.Policy // of the handler, for a FailRetry; nil: none
	Step    NumberedStep   // of a FailSuspend
}

// hasPolicy is added to the Failure that is sent.
const hasPolicy = 1 << 5

func (b *Fail) Append(dst []byte) []byte {
	how := byte(b.How)
	if b.Policy != nil {
		how |= hasPolicy
	}
	dst = append(wire.AppendBool(AppendReceipt(dst, b.Receipt), b.WaitsForRoom()), how)
	if b.Policy != nil {
		dst = wire.AppendBytes(dst, wire.AppendJSON(nil, b.Policy))
	}
	if b.How == engine.FailSuspend {
		dst = b.Step.append(dst)
	}
	return appendLastNotes(wire.AppendBytes(wire.AppendInt(dst, b.Wait), b.Cause), b.Notes)
}

func (b *Fail) Read(r *wire.Reader) {
	b.Receipt = readReceipt(r)
	b.setWaits(r.Bool())
	b.How = engine.Failure(r.Byte())
	if b.How&hasPolicy != 0 {
		b.How, b.Policy = b.How&^hasPolicy, new(record.Policy)
		if r.JSON(r.Bytes(), b.Policy); b.Policy.Check("") != nil {
			r.Fail()
		}
	}
	if b.How&^engine.StillRuns > engine.FailOverdue && b.How != engine.FailSuspend && b.How != engine.FailUnhandled {
		r.Fail()
	}
	if b.How == engine.FailSuspend {
		b.Step.read(r)
	}
	b.Wait, b.Cause, b.Notes = r.Int(), r.String(), readLastNotes(r)
}

// NumberedStep is a step with its number among the steps of its task, from 0.
type NumberedStep struct {
	Number uint32
	record.Step
}

func (s *NumberedStep) append(dst []byte) []byte {
	return s.Step.Append(wire.AppendUint(dst, uint64(s.Number)))
}

func (s *NumberedStep) read(r *wire.Reader) {
	s.Number, s.Step = r.Uint32(), record.ReadStep(r)
}

// Step stores the result of a step of a task, or its cursors.
type Step struct {
	Silent
	RoomWait
	Receipt engine.Receipt
	Of      NumberedStep
	Cursors []byte // encoded, in place of a step; nil: of a step
}

func (b *Step) Append(dst []byte) []byte {
	dst = wire.AppendBool(AppendReceipt(dst, b.Receipt), b.WaitsForRoom())
	if dst = wire.AppendBytes(dst, b.Cursors); b.Cursors != nil {
		return dst
	}
	return b.Of.append(dst)
}

func (b *Step) Read(r *wire.Reader) {
	b.Receipt = readReceipt(r)
	b.setWaits(r.Bool())
	if b.Cursors = r.Bytes(); len(b.Cursors) == 0 {
		b.Cursors = nil
		b.Of.read(r)
	} else if _, err := record.ParseCursors(b.Cursors); err != nil {
		r.Fail()
	}
}

// Signal gives a signal to a task.
type Signal struct {
	Silent
	ID    keys.ID
	Name  string
	Value []byte
}

func (b *Signal) Decide(s *engine.State) (engine.Verdict, error) {
	signal := record.Signal{Name: b.Name, Size: uint32(len(b.Value)), Value: b.Value}
	return s.Alter(b.ID, 0, engine.AlterTo{Signal: &signal})
}

func (b *Signal) Append(dst []byte) []byte {
	return wire.AppendBytes(wire.AppendBytes(append(dst, b.ID[:]...), b.Name), b.Value)
}

func (b *Signal) Read(r *wire.Reader) { b.ID, b.Name, b.Value = keys.ReadID(r), r.String(), r.Bytes() }

// RoomWait is embedded in operations that may wait for room as long as their callers do, such as
// the outcomes of Run's handlers.
type RoomWait struct {
	Gone <-chan struct{} // closed when the caller waits no longer; nil: it does not wait for room
	left chan struct{}   // the same channel as Gone, if the caller is on another node
}

// WaitsForRoom reports whether the caller waits.
func (w *RoomWait) WaitsForRoom() bool {
	return w.Gone != nil && !base.IsClosed(w.Gone)
}

// setWaits sets whether the caller, on another node, waits.
func (w *RoomWait) setWaits(waits bool) {
	if waits {
		w.left = make(chan struct{})
		w.Gone = w.left
	}
}

// Leave is called when the caller on another node has gone.
func (w *RoomWait) Leave() {
	if w.left != nil {
		close(w.left)
	}
}
