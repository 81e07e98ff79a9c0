// Package record is the stored form of a task: what its producer set, its history, and its payload.
// Its queue, tenant and priority are in its key and in the catalogue.
package record

import (
	"encoding/binary"
	"errors"
	"fmt"

	"codeq/internal/wire"
)

// Head is the part of a task that the engine needs to decide on it, and that is decoded without an
// allocation. Times are milliseconds.
type Head struct {
	Attempts    uint32 // attempts counted so far
	Leases      uint32 // leases granted so far; at least Attempts
	MaxAttempts uint32
	// DeadKind says of a dead letter under which kind of errors it is counted: 1 + its number in
	// the queue; 0: it is not counted.
	DeadKind  uint32
	Lease     uint64
	Timeout   uint64
	Retention int64 // negative: for ever
	RunAt     uint64
	Ties
	// Expired: a lease has expired since the attempts were last reset.
	Expired bool
	// Rewritten: the key of the record was written before.
	Rewritten bool
	// HoldsTurn: the task is a dead letter and has the turn of its group.
	HoldsTurn bool
	// Crashes counts the times that the process has died with the task at work, and not only for
	// the task, since the attempts were last reset.
	Crashes uint32
	// Suspect: the task may be the reason why the process has died.
	Suspect bool
	// MaxWait is how long after its produce a task is put off at the most by tasks that replace it,
	// ms; 0: no bound. It is with an idempotency key only.
	MaxWait uint64
	// Steps is how many finished steps lie beside the record of an unended task. During a lease
	// there may be more.
	Steps uint32
	// Beside says what else may lie beside the record. During a lease there may be more.
	Beside uint8
	// RetryFirst: when the wait between two attempts is over, the task goes before those that were
	// produced after it.
	RetryFirst bool
}

// The bits of Beside.
const (
	// HasSignals: the task has got signals.
	HasSignals = 1 << iota
	// HasCursors: its handlers have set cursors.
	HasCursors
	// Awaits: no run of the task has begun since it was suspended. If its last step is a
	// StepNoSignal, the signal of that name makes it go on.
	Awaits

	allBeside = Awaits<<1 - 1
)

// IsWait reports whether a scheduled task waits between attempts, until some time, and not for its
// RunAt.
func (h *Head) IsWait(until uint64) bool { return h.RunAt != until }

// Ties connect a task to others. The zero Ties are none.
type Ties struct {
	Unique    [UniqueLen]byte // hash of the idempotency key and its scope
	UniqueFor uint64          // how long the key is taken at least, ms
	Group     uint64          // hash of the group and its scope
	Limit     uint64          // hash of the key of a limit and its scope
	Flags     uint8           // of the idempotency key
	Parent    bool            // other tasks wait for its end
	Child     bool            // it has Parents; set in decoded records
}

// The flags of an idempotency key.
const (
	ReleaseOnComplete = 1 << iota
	ReleaseOnDead
	ReplaceWaiting
	// HoldsKey: until the task ends, it holds its key. ReleaseKey clears it for an unended task, so
	// that the end of a task need not look up the holder of the key. A task without it may still
	// hold its key.
	HoldsKey
	// ReleaseOnClaim: while the task is leased, another one with the flag takes its key. Not with
	// HoldsKey.
	ReleaseOnClaim
	hasMaxWait // only in the stored form
)

// KeyFlags returns HoldsKey for a task with other flags that gets its key, unless it may lose it.
func KeyFlags(flags uint8) uint8 {
	if flags&ReleaseOnClaim != 0 {
		return 0
	}
	return HoldsKey
}

// UniqueLen is the length of the hash of an idempotency key.
const UniqueLen = 16

// IDLen is the length of a task ID.
const IDLen = 16

// Record is a decoded task. A zero field takes no space. The zero Record with a payload costs one
// byte more than the payload.
type Record struct {
	Head
	Error     string // of the last attempt
	Headers   map[string]string
	UniqueKey string
	GroupKey  string
	LimitKey  string
	Kind      string
	Parents   [][IDLen]byte // tasks that must end before this one
	OnDead    uint8         // action when a parent dies; stored only with Parents, like OnMissing
	OnMissing uint8         // action if a parent is gone; less than 16, like OnDead
	History   *History      // nil: no attempt has ended
	Notes     *Notes        // nil: none
	Kept      []Step        // the steps of a task that has ended
	Cursors   Cursors       // those of a task that has ended
	Payload   []byte
}

// A record is these flags as a varint, the fields that they announce in this order, and the
// payload. The flags that most tasks use fit in one byte.
const (
	hasHistory = 1 << iota
	hasMaxAttempts
	hasLease
	hasTimeout
	hasRetention
	hasError
	hasHeaders

	hasRunAt
	hasUnique
	hasGroup
	hasLimit
	hasParents
	isParent
	isRewritten
	hasExpired
	holdsTurn
	hasAttempts
	hasNotes
	hasCrashes
	hasSteps
	hasKeptSteps
	hasKind
	hasLogs
	hasBeside
	hasCursors
	retriesFirst
	hasDeadKind

	oneByte  = hasRunAt - 1
	allFlags = hasDeadKind<<1 - 1
)

// errMalformed is wrapped by every error of Decode.
var errMalformed = errors.New("malformed record")

// Encode returns the stored form. Equal records have equal forms: headers are sorted by name.
func (r *Record) Encode() []byte { return r.Append(make([]byte, 0, r.MaxSize())) }

// MaxSize returns an upper bound of the length of the stored form: the exact length for a record
// with only a payload.
func (r *Record) MaxSize() int {
	if r.plain() {
		return PlainSize(r.Payload)
	}
	n := 4 + 20*binary.MaxVarintLen64 + len(r.Error) + len(r.Kind) + len(r.Payload)
	for k, v := range r.Headers {
		n += 2*binary.MaxVarintLen32 + len(k) + len(v)
	}
	if r.Ties != (Ties{}) {
		n += UniqueLen + 1 + 8 + 8 + len(r.UniqueKey) + len(r.GroupKey) + len(r.LimitKey)
	}
	if r.History != nil {
		n += r.History.maxSize()
	}
	if r.Notes != nil {
		n += r.Notes.maxSize()
	}
	for i := range r.Kept {
		n += r.Kept[i].maxSize()
	}
	if len(r.Cursors) > 0 {
		n += r.Cursors.maxSize()
	}
	return n + IDLen*len(r.Parents)
}

func (r *Record) flags() uint64 {
	var flags uint64
	for _, f := range [...]struct {
		flag uint64
		set  bool
	}{
		{hasHistory, r.Attempts != 0 || r.Leases != 0},
		{hasMaxAttempts, r.MaxAttempts != 0},
		{hasLease, r.Lease != 0},
		{hasTimeout, r.Timeout != 0},
		{hasRetention, r.Retention != 0},
		{hasError, r.Error != ""},
		{hasHeaders, len(r.Headers) != 0},
		{hasRunAt, r.RunAt != 0},
		{hasUnique, r.Unique != [UniqueLen]byte{}},
		{hasGroup, r.Group != 0},
		{hasLimit, r.Limit != 0},
		{hasParents, len(r.Parents) != 0},
		{isParent, r.Parent},
		{isRewritten, r.Rewritten},
		{hasExpired, r.Expired},
		{holdsTurn, r.HoldsTurn},
		{hasAttempts, r.History != nil},
		{hasNotes, r.Notes != nil},
		{hasCrashes, r.Crashes != 0 || r.Suspect},
		{hasSteps, r.Steps != 0},
		{hasKeptSteps, len(r.Kept) != 0},
		{hasKind, r.Kind != ""},
		{hasLogs, r.Notes != nil && len(r.Notes.Logs) != 0},
		{hasBeside, r.Beside != 0},
		{hasCursors, len(r.Cursors) != 0},
		{retriesFirst, r.RetryFirst},
		{hasDeadKind, r.DeadKind != 0},
	} {
		if f.set {
			flags |= f.flag
		}
	}
	return flags
}

// Append appends the stored form.
func (r *Record) Append(b []byte) []byte {
	if r.plain() {
		return AppendPlain(b, r.Payload)
	}
	flags := r.flags()
	b = wire.AppendUint(b, flags)
	if flags&hasHistory != 0 {
		b = wire.AppendUint(b, uint64(r.Attempts))
		b = wire.AppendUint(b, uint64(r.Leases))
	}
	if flags&hasMaxAttempts != 0 {
		b = wire.AppendUint(b, uint64(r.MaxAttempts))
	}
	if flags&hasLease != 0 {
		b = wire.AppendUint(b, r.Lease)
	}
	if flags&hasTimeout != 0 {
		b = wire.AppendUint(b, r.Timeout)
	}
	if flags&hasRetention != 0 {
		b = wire.AppendInt(b, r.Retention)
	}
	if flags&hasRunAt != 0 {
		b = wire.AppendUint(b, r.RunAt)
	}
	if flags&hasUnique != 0 {
		b = append(b, r.Unique[:]...)
		b = wire.AppendUint(b, r.UniqueFor)
		if b = append(b, r.Flags&^hasMaxWait); r.MaxWait != 0 {
			b[len(b)-1] |= hasMaxWait
			b = wire.AppendUint(b, r.MaxWait)
		}
	}
	if flags&hasGroup != 0 {
		b = binary.BigEndian.AppendUint64(b, r.Group)
	}
	if flags&hasLimit != 0 {
		b = binary.BigEndian.AppendUint64(b, r.Limit)
	}
	if flags&hasCrashes != 0 {
		n := uint64(r.Crashes) << 1
		if r.Suspect {
			n |= 1
		}
		b = wire.AppendUint(b, n)
	}
	if flags&hasSteps != 0 {
		b = wire.AppendUint(b, uint64(r.Steps))
	}
	if flags&hasBeside != 0 {
		b = append(b, r.Beside)
	}
	if flags&hasDeadKind != 0 {
		b = wire.AppendUint(b, uint64(r.DeadKind))
	}
	if flags&hasError != 0 {
		b = wire.AppendBytes(b, r.Error)
	}
	if flags&hasHeaders != 0 {
		b = appendMap(b, r.Headers)
	}
	if flags&hasUnique != 0 {
		b = wire.AppendBytes(b, r.UniqueKey)
	}
	if flags&hasGroup != 0 {
		b = wire.AppendBytes(b, r.GroupKey)
	}
	if flags&hasLimit != 0 {
		b = wire.AppendBytes(b, r.LimitKey)
	}
	if flags&hasKind != 0 {
		b = wire.AppendBytes(b, r.Kind)
	}
	if flags&hasParents != 0 {
		b = wire.AppendUint(append(b, r.OnMissing<<4|r.OnDead), uint64(len(r.Parents)))
		for _, id := range r.Parents {
			b = append(b, id[:]...)
		}
	}
	if flags&hasAttempts != 0 {
		b = r.History.append(b)
	}
	if flags&hasNotes != 0 {
		b = r.Notes.Append(b)
	}
	if flags&hasLogs != 0 {
		b = AppendLogs(b, r.Notes.Logs)
	}
	if flags&hasKeptSteps != 0 {
		b = appendSteps(b, r.Kept)
	}
	if flags&hasCursors != 0 {
		b = r.Cursors.Append(b)
	}
	return append(b, r.Payload...)
}

func (r *Record) plain() bool {
	return r.Head == Head{} && r.Error == "" && len(r.Headers) == 0 && len(r.Parents) == 0 &&
		r.History == nil && r.Notes == nil && len(r.Kept) == 0 && r.Kind == "" && len(r.Cursors) == 0
}

// PlainSize is the length of the stored form of a record that has only a payload.
func PlainSize(payload []byte) int { return 1 + len(payload) }

// AppendPlain appends the stored form of a record that has only a payload.
func AppendPlain(b, payload []byte) []byte { return append(append(b, 0), payload...) }

// Plain returns the payload of a stored record that has only a payload.
func Plain(b []byte) (payload []byte, ok bool) {
	if len(b) > 0 && b[0] == 0 {
		return b[1:], true
	}
	return nil, false
}

// HasKind reports whether a stored record has a kind.
func HasKind(b []byte) bool {
	return readFlags(wire.NewReader(b))&hasKind != 0
}

// HasNewKey reports whether a stored record has MaxWait or ReleaseOnClaim, which came with kinds.
func HasNewKey(b []byte) bool {
	h, err := DecodeHead(b)
	return err == nil && (h.MaxWait != 0 || h.Flags&ReleaseOnClaim != 0)
}

// DecodeHead reads the head of a stored record.
func DecodeHead(b []byte) (Head, error) {
	r := wire.NewReader(b)
	h := readHead(r, readFlags(r))
	if r.Failed() {
		return Head{}, malformed(b)
	}
	return h, nil
}

// Decode reads a stored record. Payload aliases b.
func Decode(b []byte) (Record, error) {
	r := wire.NewReader(b)
	flags := readFlags(r)
	rec := Record{Head: readHead(r, flags)}
	if flags&hasError != 0 {
		rec.Error = r.String()
	}
	if flags&hasHeaders != 0 {
		rec.Headers = readMap(r)
	}
	if flags&hasUnique != 0 {
		rec.UniqueKey = r.String()
	}
	if flags&hasGroup != 0 {
		rec.GroupKey = r.String()
	}
	if flags&hasLimit != 0 {
		rec.LimitKey = r.String()
	}
	if flags&hasKind != 0 {
		if rec.Kind = r.String(); rec.Kind == "" {
			r.Fail()
		}
	}
	if flags&hasParents != 0 {
		both := r.Byte()
		rec.OnMissing, rec.OnDead = both>>4, both&(1<<4-1)
		rec.Parents = readIDs(r)
	}
	if flags&hasAttempts != 0 {
		rec.History = readHistory(r)
	}
	if flags&hasNotes != 0 {
		rec.Notes = ReadNotes(r)
	}
	if flags&hasLogs != 0 {
		if logs := ReadLogs(r); rec.Notes != nil {
			rec.Notes.Logs = logs
		} else {
			r.Fail()
		}
	}
	if flags&hasKeptSteps != 0 {
		rec.Kept = readSteps(r)
	}
	if flags&hasCursors != 0 {
		rec.Cursors = readCursors(r)
	}
	rec.Payload = r.Rest()
	if r.Failed() {
		return Record{}, malformed(b)
	}
	return rec, nil
}

func malformed(b []byte) error {
	return fmt.Errorf("%w: %d bytes, beginning %x", errMalformed, len(b), b[:min(len(b), 16)])
}

func readFlags(r *wire.Reader) uint64 {
	flags := r.Uint()
	if flags > allFlags {
		r.Fail()
	}
	return flags
}

func readHead(r *wire.Reader, flags uint64) (h Head) {
	if flags&hasHistory != 0 {
		h.Attempts, h.Leases = r.Uint32(), r.Uint32()
	}
	if flags&hasMaxAttempts != 0 {
		h.MaxAttempts = r.Uint32()
	}
	if flags&hasLease != 0 {
		h.Lease = r.Uint()
	}
	if flags&hasTimeout != 0 {
		h.Timeout = r.Uint()
	}
	if flags&hasRetention != 0 {
		h.Retention = r.Int()
	}
	if flags <= oneByte {
		return h
	}
	if flags&hasRunAt != 0 {
		h.RunAt = r.Uint()
	}
	if flags&hasUnique != 0 {
		copy(h.Unique[:], r.Take(UniqueLen))
		h.UniqueFor = r.Uint()
		if h.Flags = r.Byte(); h.Flags&hasMaxWait != 0 {
			h.Flags &^= hasMaxWait
			if h.MaxWait = r.Uint(); h.MaxWait == 0 {
				r.Fail()
			}
		}
		if h.Unique == [UniqueLen]byte{} {
			r.Fail()
		}
	}
	if flags&hasGroup != 0 {
		h.Group = readHash(r)
	}
	if flags&hasLimit != 0 {
		h.Limit = readHash(r)
	}
	if flags&hasCrashes != 0 {
		n := r.Uint()
		if n == 0 || n>>33 != 0 {
			r.Fail()
		}
		h.Crashes, h.Suspect = uint32(n>>1), n&1 != 0
	}
	if flags&hasSteps != 0 {
		if h.Steps = r.Uint32(); h.Steps == 0 {
			r.Fail()
		}
	}
	if flags&hasBeside != 0 {
		if h.Beside = r.Byte(); h.Beside == 0 || h.Beside > allBeside || h.Beside&Awaits != 0 && h.Steps == 0 {
			r.Fail()
		}
	}
	if flags&hasDeadKind != 0 {
		if h.DeadKind = r.Uint32(); h.DeadKind == 0 {
			r.Fail()
		}
	}
	h.Parent = flags&isParent != 0
	h.Child = flags&hasParents != 0
	h.Rewritten = flags&isRewritten != 0
	h.Expired = flags&hasExpired != 0
	h.HoldsTurn = flags&holdsTurn != 0
	h.RetryFirst = flags&retriesFirst != 0
	return h
}

// readHash reads a hash that is not zero.
func readHash(r *wire.Reader) uint64 {
	h := r.Fixed64()
	if h == 0 {
		r.Fail()
	}
	return h
}

func readIDs(r *wire.Reader) [][IDLen]byte {
	n := r.Count(IDLen)
	if n == 0 {
		r.Fail()
		return nil
	}
	ids := make([][IDLen]byte, n)
	for i := range ids {
		copy(ids[i][:], r.Take(IDLen))
	}
	return ids
}
