// Package call holds the operations of a shard as values. A [Wire] is the arguments and the answer
// of a call, and how both are sent between nodes; a [Body] is one that the rules decide by
// themselves. For a produce, the package has the batch of tasks ([BatchBuilder], [SplitBatch]), and
// the numbers that keep a repeated one from being stored twice ([Session]).
package call

import (
	"errors"

	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/wire"
)

// Body is a call. Its fields are the arguments and, after Decide or ReadReply, the answer.
type Body interface {
	// Decide is called by the owner of the shard.
	Decide(*engine.State) (engine.Verdict, error)
	Wire
}

// Wire is a call as nodes send it.
type Wire interface {
	// Append appends the arguments, for Read.
	Append(dst []byte) []byte
	Read(*wire.Reader)
	// AppendReply appends the answer, if it was not an error, for ReadReply.
	AppendReply(dst []byte) []byte
	ReadReply(*wire.Reader)
	// Again prepares the call for another try.
	Again()
}

// Silent is embedded in calls without an answer.
type Silent struct{}

func (Silent) AppendReply(dst []byte) []byte { return dst }
func (Silent) ReadReply(*wire.Reader)        {}
func (Silent) Again()                        {}

// Alter alters a task.
type Alter struct {
	Silent
	ID  keys.ID
	How engine.Alteration
	engine.AlterTo
}

func (b *Alter) Decide(s *engine.State) (engine.Verdict, error) {
	return s.Alter(b.ID, b.How, b.AlterTo)
}

func (b *Alter) Append(dst []byte) []byte {
	return wire.AppendBytes(wire.AppendUint(append(append(dst, b.ID[:]...), byte(b.How)), b.Arg), b.Step)
}

func (b *Alter) Read(r *wire.Reader) {
	b.ID, b.How, b.Arg, b.Step = keys.ReadID(r), readAlteration(r), r.Uint(), r.String()
}

func readAlteration(r *wire.Reader) engine.Alteration {
	how := engine.Alteration(r.Byte())
	if !how.Exists() {
		r.Fail()
	}
	return how
}

// Room returns the lowest level of free space that the alteration runs at.
func (b *Alter) Room() engine.Room     { return roomOf(b.How) }
func (b *AlterMany) Room() engine.Room { return roomOf(b.How) }

func roomOf(how engine.Alteration) engine.Room {
	switch how {
	case engine.AlterForget, engine.AlterCancel: // a task that is kept needs more
		return engine.RoomNone
	default:
		return engine.RoomLow
	}
}

// AlterMany alters many tasks that are in some states.
type AlterMany struct{ engine.BulkAlteration }

func (b *AlterMany) Decide(s *engine.State) (engine.Verdict, error) {
	return s.AlterMany(&b.BulkAlteration)
}

func (b *AlterMany) Append(dst []byte) []byte {
	dst = wire.AppendUint(append(dst, byte(b.How), byte(b.States)), b.Arg)
	return keys.AppendIDs(wire.AppendBytes(dst, b.Queue), b.IDs)
}

func (b *AlterMany) Read(r *wire.Reader) {
	b.How, b.States, b.Arg, b.Queue = readAlteration(r), record.StateSet(r.Byte()), r.Uint(), r.String()
	b.IDs = keys.ReadIDs(r)
}

func (b *AlterMany) AppendReply(dst []byte) []byte {
	return wire.AppendUint(wire.AppendUint(dst, uint64(b.N)), uint64(b.Failed))
}

func (b *AlterMany) ReadReply(r *wire.Reader) { b.N, b.Failed = int(r.Uint32()), int(r.Uint32()) }
func (b *AlterMany) Again()                   { b.Next, b.N, b.Failed = 0, 0, 0 }

// Missing asks which of some tasks do not exist.
type Missing struct {
	IDs     []keys.ID
	Missing []keys.ID
	next    int // index in IDs of the next one
}

func (b *Missing) Decide(s *engine.State) (engine.Verdict, error) {
	for ; b.next < len(b.IDs); b.next++ {
		if s.Spent() {
			return engine.Again, nil
		}
		_, v, err := s.Outcome(b.IDs[b.next], false)
		switch {
		case v != engine.Decided:
			return v, nil
		case errors.Is(err, base.ErrNotFound):
			b.Missing = append(b.Missing, b.IDs[b.next])
		case err != nil:
			return v, err
		}
	}
	return engine.Decided, nil
}

func (b *Missing) Append(dst []byte) []byte      { return keys.AppendIDs(dst, b.IDs) }
func (b *Missing) Read(r *wire.Reader)           { b.IDs = keys.ReadIDs(r) }
func (b *Missing) AppendReply(dst []byte) []byte { return keys.AppendIDs(dst, b.Missing) }
func (b *Missing) ReadReply(r *wire.Reader)      { b.Missing = keys.ReadIDs(r) }
func (b *Missing) Again()                        { b.Missing, b.next = nil, 0 }

// Clock asks for the time of the shard's clock that stamps IDs and the ends of tasks.
type Clock struct{ Time uint64 } // ms since 1970

func (b *Clock) Decide(s *engine.State) (engine.Verdict, error) {
	b.Time = s.Clock().Stamps
	return engine.Decided, nil
}

func (b *Clock) Append(dst []byte) []byte      { return dst }
func (b *Clock) Read(*wire.Reader)             {}
func (b *Clock) AppendReply(dst []byte) []byte { return wire.AppendUint(dst, b.Time) }
func (b *Clock) ReadReply(r *wire.Reader)      { b.Time = r.Uint() }
func (b *Clock) Again()                        {}

// ReleaseKey frees an idempotency key.
type ReleaseKey struct {
	Silent
	Hash [keys.UniqueLen]byte
	Key  string
}

func (b *ReleaseKey) Decide(s *engine.State) (engine.Verdict, error) {
	return s.ReleaseKey(b.Hash, b.Key)
}

func (b *ReleaseKey) Append(dst []byte) []byte {
	return wire.AppendBytes(append(dst, b.Hash[:]...), b.Key)
}

func (b *ReleaseKey) Read(r *wire.Reader) {
	copy(b.Hash[:], r.Take(len(b.Hash)))
	b.Key = r.String()
}

// Renew extends leases that belong to one process. Without a cluster nothing is written.
type Renew struct {
	Receipts []engine.Receipt
	Duration uint64           // ms
	Lost     []engine.Receipt // those not in force
	Errs     []error          // why
}

func (b *Renew) Decide(s *engine.State) (engine.Verdict, error) {
	for _, receipt := range b.Receipts {
		if err := s.Leases.Extend(receipt, b.Duration); err != nil {
			b.Lost, b.Errs = append(b.Lost, receipt), append(b.Errs, err)
		}
	}
	return engine.Decided, nil
}

func (b *Renew) Append(dst []byte) []byte {
	return appendReceipts(wire.AppendUint(dst, b.Duration), b.Receipts)
}

func (b *Renew) Read(r *wire.Reader) { b.Duration, b.Receipts = r.Uint(), ReadReceipts(r) }

func (b *Renew) AppendReply(dst []byte) []byte {
	dst = appendReceipts(dst, b.Lost)
	for _, err := range b.Errs {
		dst = wire.AppendBool(dst, errors.Is(err, base.ErrCanceled))
	}
	return dst
}

func (b *Renew) ReadReply(r *wire.Reader) {
	b.Lost = ReadReceipts(r)
	for _, receipt := range b.Lost {
		b.Errs = append(b.Errs, engine.LeaseLost(receipt, r.Bool()))
	}
}

func (b *Renew) Again() { b.Lost, b.Errs = nil, nil }

// Extend moves the deadline of a lease.
type Extend struct {
	Silent
	Receipt  engine.Receipt
	Duration uint64 // ms
}

func (b *Extend) Decide(s *engine.State) (engine.Verdict, error) {
	return engine.Decided, s.Leases.Extend(b.Receipt, b.Duration)
}

func (b *Extend) Append(dst []byte) []byte {
	return wire.AppendUint(AppendReceipt(dst, b.Receipt), b.Duration)
}

func (b *Extend) Read(r *wire.Reader) { b.Receipt, b.Duration = readReceipt(r), r.Uint() }

// Note stores the notes of a handler about its work.
type Note struct {
	Silent
	Receipt engine.Receipt
	Notes   *record.Notes
}

func (b *Note) Decide(s *engine.State) (engine.Verdict, error) {
	return engine.Decided, s.Leases.Note(b.Receipt, b.Notes)
}

func (b *Note) Append(dst []byte) []byte {
	return appendLastNotes(AppendReceipt(dst, b.Receipt), b.Notes)
}

func (b *Note) Read(r *wire.Reader) { b.Receipt, b.Notes = readReceipt(r), readNotes(r) }

// appendLastNotes ends an operation with the notes of its handler; nil: it has none.
func appendLastNotes(dst []byte, n *record.Notes) []byte {
	if n == nil {
		return dst
	}
	dst = n.Append(dst)
	if len(n.Logs) == 0 { // nodes of an earlier format know none
		return dst
	}
	return record.AppendLogs(dst, n.Logs)
}

// readLastNotes reads what appendLastNotes has appended.
func readLastNotes(r *wire.Reader) *record.Notes {
	if r.Len() == 0 {
		return nil
	}
	return readNotes(r)
}

// readNotes reads the notes at the end, and refuses what no node takes from a handler.
func readNotes(r *wire.Reader) *record.Notes {
	n := record.ReadNotes(r)
	if r.Len() > 0 {
		n.Logs = record.ReadLogs(r)
	}
	if n.Size() > record.MaxNotes || record.SoundLogs(n.Logs) != nil {
		r.Fail()
	}
	return n
}

// AppendReceipt appends a receipt.
func AppendReceipt(dst []byte, r engine.Receipt) []byte {
	return wire.AppendUint(append(dst, r.ID[:]...), r.Token)
}

// readReceipt reads what AppendReceipt has appended.
func readReceipt(r *wire.Reader) engine.Receipt {
	return engine.Receipt{ID: keys.ReadID(r), Token: r.Uint()}
}

// appendReceipts appends the number of receipts, and the receipts.
func appendReceipts(dst []byte, list []engine.Receipt) []byte {
	dst = wire.AppendUint(dst, uint64(len(list)))
	for _, receipt := range list {
		dst = AppendReceipt(dst, receipt)
	}
	return dst
}

// ReadReceipts reads what appendReceipts has appended.
func ReadReceipts(r *wire.Reader) []engine.Receipt {
	list := make([]engine.Receipt, r.Count(keys.IDLen+1))
	for i := range list {
		list[i] = readReceipt(r)
	}
	return list
}
