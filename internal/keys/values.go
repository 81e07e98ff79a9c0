package keys

import (
	"bytes"
	"encoding/binary"

	"codeq/internal/wire"
)

// LaneValue is the catalogue entry of a lane. An unused lane leaves memory, and gets another number
// when it comes back; ready and leased tasks lie under its last number.
type LaneValue struct {
	Queue    uint32
	Priority uint8 // below 128
	Tenant   string
	// Among the entries of one queue name, tenant and priority, the one with the largest Seq has
	// the last number.
	Seq uint64
}

// laneSeq in the priority: Seq follows; otherwise Seq is 0.
const laneSeq = 0x80

// Append appends the encoded entry.
func (v LaneValue) Append(dst []byte) []byte {
	dst = binary.BigEndian.AppendUint32(dst, v.Queue)
	if v.Seq == 0 {
		return append(append(dst, v.Priority), v.Tenant...)
	}
	dst = binary.BigEndian.AppendUint64(append(dst, v.Priority|laneSeq), v.Seq)
	return append(dst, v.Tenant...)
}

// ParseLaneValue reads a lane's catalogue entry.
func ParseLaneValue(b []byte) (LaneValue, error) {
	v, tenant, err := SplitLaneValue(b)
	v.Tenant = string(tenant)
	return v, err
}

// SplitLaneValue is ParseLaneValue without a copy of the tenant, which aliases b.
func SplitLaneValue(b []byte) (v LaneValue, tenant []byte, err error) {
	if len(b) < 5 || b[4]&laneSeq != 0 && len(b) < 5+8 {
		return v, nil, malformed("lane entry", b)
	}
	v = LaneValue{Queue: binary.BigEndian.Uint32(b), Priority: b[4] &^ laneSeq}
	if tenant = b[5:]; b[4]&laneSeq != 0 {
		v.Seq, tenant = binary.BigEndian.Uint64(tenant), tenant[8:]
		if v.Seq == 0 {
			return LaneValue{}, nil, malformed("lane entry", b)
		}
	}
	return v, tenant, nil
}

// Counts is the number of tasks of a queue by state.
type Counts struct {
	Ready, Scheduled, Blocked, Leased, Dead, Done, Canceled uint64
}

// Add adds the counts of o.
func (c *Counts) Add(o Counts) {
	c.Ready += o.Ready
	c.Scheduled += o.Scheduled
	c.Blocked += o.Blocked
	c.Leased += o.Leased
	c.Dead += o.Dead
	c.Done += o.Done
	c.Canceled += o.Canceled
}

// Ended returns the number of tasks in a range of ended tasks.
// REQUIRES: Ended(prefix).
func (c *Counts) Ended(prefix byte) *uint64 {
	switch prefix {
	case Dead:
		return &c.Dead
	case Done:
		return &c.Done
	default:
		return &c.Canceled
	}
}

// CountersValue is the value of a counters key: the counts of a queue, the value of the shard's
// clock at that time, and the queue's totals.
type CountersValue struct {
	Counts
	Clock  uint64
	Totals TotalsValue
}

// CountersLen is the length of an encoded CountersValue without totals.
const CountersLen = 8 * 8

// Append appends the encoded value. Empty totals are left out.
func (v *CountersValue) Append(dst []byte) []byte {
	for _, n := range [...]uint64{v.Clock, v.Ready, v.Scheduled, v.Blocked, v.Leased, v.Dead, v.Done, v.Canceled} {
		dst = binary.BigEndian.AppendUint64(dst, n)
	}
	if v.Totals.Day == 0 {
		return dst
	}
	return v.Totals.Append(dst)
}

// ParseCounters reads the value of a counters key.
func ParseCounters(b []byte) (v CountersValue, err error) {
	if len(b) < CountersLen {
		return v, malformed("counters", b)
	}
	at := func(i int) uint64 { return binary.BigEndian.Uint64(b[i*8:]) }
	v.Clock = at(0)
	v.Counts = Counts{
		Ready: at(1), Scheduled: at(2), Blocked: at(3), Leased: at(4), Dead: at(5), Done: at(6), Canceled: at(7),
	}
	if len(b) > CountersLen {
		v.Totals, err = ParseTotals(b[CountersLen:])
	}
	return v, err
}

// AppendNumber appends a value that is one number: the size of a bucket, the last message taken or
// sent, the number of parents that a task waits for, the clock of leases.
func AppendNumber(dst []byte, n uint64) []byte { return binary.BigEndian.AppendUint64(dst, n) }

// ParseNumber is the inverse of AppendNumber.
func ParseNumber(b []byte) (uint64, error) {
	if len(b) != 8 {
		return 0, malformed("number", b)
	}
	return binary.BigEndian.Uint64(b), nil
}

// PinnedValue describes the pins that keep the result of a task.
type PinnedValue struct {
	Count uint64 // of pins; 1 or more
	Until uint64 // the bucket to which the task then moves; 0: that of its retention
}

// Append appends the encoded value.
func (v PinnedValue) Append(dst []byte) []byte {
	return AppendNumber(AppendNumber(dst, v.Count), v.Until)
}

// ParsePinned is the inverse of Append.
func ParsePinned(b []byte) (PinnedValue, error) {
	if len(b) != 16 {
		return PinnedValue{}, malformed("pins", b)
	}
	return PinnedValue{binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[8:])}, nil
}

// LeaseTimeValue is the clock of leases, and the crashes of processes that may still have leases.
type LeaseTimeValue struct {
	Clock   uint64 // ms
	Crashes []CrashValue
}

// CrashValue is the crash of a process of a cluster.
type CrashValue struct {
	Process  uint64 // its number; 0: not known
	Until    uint64 // by the clock of leases, when all of its leases have ended
	Suspects uint64 // tasks that were at work
	Partial  bool   // there may have been more
}

const crashLen = 8 + 8 + 8

// Append appends the encoded value.
func (v LeaseTimeValue) Append(dst []byte) []byte {
	dst = AppendNumber(dst, v.Clock)
	for _, c := range v.Crashes {
		n := c.Suspects << 1
		if c.Partial {
			n++
		}
		dst = AppendNumber(AppendNumber(AppendNumber(dst, c.Process), c.Until), n)
	}
	return dst
}

// ParseLeaseTime is the inverse of Append.
func ParseLeaseTime(b []byte) (v LeaseTimeValue, err error) {
	if len(b)%crashLen != 8 {
		return v, malformed("clock of leases", b)
	}
	v.Clock = binary.BigEndian.Uint64(b)
	for b = b[8:]; len(b) > 0; b = b[crashLen:] {
		n := binary.BigEndian.Uint64(b[16:])
		v.Crashes = append(v.Crashes, CrashValue{binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[8:]), n >> 1, n&1 != 0})
	}
	return v, nil
}

// PeriodTimeValue is the clock of periods: of idempotency keys, waits between attempts and
// retention.
type PeriodTimeValue struct {
	Clock uint64 // ms since 1970
	Waits uint64 // no task waits between attempts until an earlier time
}

const periodTimeLen = 8 + 8

// Append appends the encoded value.
func (v PeriodTimeValue) Append(dst []byte) []byte {
	return AppendNumber(AppendNumber(dst, v.Clock), v.Waits)
}

// ParsePeriodTime is the inverse of Append.
func ParsePeriodTime(b []byte) (PeriodTimeValue, error) {
	if len(b) != periodTimeLen {
		return PeriodTimeValue{}, malformed("clock of periods", b)
	}
	return PeriodTimeValue{binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[8:])}, nil
}

// ClockSet records that the wall clock of a shard was set, or that the shard was closed for some
// time.
type ClockSet struct {
	At     uint64 // the last stamp before the change, ms since 1970
	Wall   uint64 // the wall clock after the change, ms since 1970
	Opened bool   // the shard was closed between the two
}

const clockSetLen = 8 + 8 + 1

// AppendClockSets appends the encoded list.
func AppendClockSets(dst []byte, sets []ClockSet) []byte {
	for _, s := range sets {
		opened := byte(0)
		if s.Opened {
			opened = 1
		}
		dst = append(AppendNumber(AppendNumber(dst, s.At), s.Wall), opened)
	}
	return dst
}

// ParseClockSets is the inverse of AppendClockSets.
func ParseClockSets(b []byte) (sets []ClockSet, err error) {
	if len(b) == 0 || len(b)%clockSetLen != 0 {
		return nil, malformed("list of set clocks", b)
	}
	for rest := b; len(rest) > 0; rest = rest[clockSetLen:] {
		s := ClockSet{binary.BigEndian.Uint64(rest), binary.BigEndian.Uint64(rest[8:]), rest[16] == 1}
		if n := len(sets); rest[16] > 1 || n > 0 && s.At < sets[n-1].At {
			return nil, malformed("list of set clocks", b)
		}
		sets = append(sets, s)
	}
	return sets, nil
}

// SettingsValue has the settings of a queue. The one with the larger version counts.
type SettingsValue struct {
	Version uint64 // 1 or more, and below 2^56
	JSON    []byte // an object
}

// JSON for queues without settings.
var (
	NoSettings    = []byte(`{"None":true}`)                // of a queue with default settings
	QueueIsGone   = []byte(`{"None":true,"Deleted":true}`) // of a queue that was deleted
	DeleteQueue   = []byte(`{"Deleted":true}`)             // asks the first shard for QueueIsGone
	GivenSettings = []byte("{}")                           // of GivenKey
)

// GivenKey returns the key of the entry for dropped settings, in the range of settings: it has the
// largest version among the dropped settings of all queues. Settings of a queue without an entry
// are newer only if their version is larger.
func GivenKey() []byte { return []byte{Settings} }

// IsNone reports whether the value means that the shard keeps no settings of the queue.
func (v SettingsValue) IsNone() bool {
	return bytes.Equal(v.JSON, NoSettings) || bytes.Equal(v.JSON, QueueIsGone)
}

// Append appends the encoded value.
func (v SettingsValue) Append(dst []byte) []byte {
	return append(binary.BigEndian.AppendUint64(dst, v.Version), v.JSON...)
}

// ParseSettings reads the settings of a queue; JSON aliases b.
func ParseSettings(b []byte) (SettingsValue, error) {
	if len(b) > 8 {
		v := SettingsValue{Version: binary.BigEndian.Uint64(b), JSON: b[8:]}
		if v.Version > 0 && b[0] == 0 && b[8] == '{' {
			return v, nil
		}
	}
	return SettingsValue{}, malformed("settings", b)
}

// Place is the place of a task's record. It is the value of an index entry, except for ended tasks,
// which are found by their queue.
type Place struct {
	Range byte
	Group uint32 // the lane (Task), nothing (Scheduled), or the queue
	At    uint64 // since (Task), due time (Scheduled), scope (Blocked), or bucket
}

// PlaceLen is the length of an encoded Place.
const PlaceLen = 1 + 4 + 8

// FirstPlace returns the place of a task that was never moved.
func FirstPlace(lane uint32, id ID) Place {
	return Place{Range: Task, Group: lane, At: SinceOf(id)}
}

// IsIndexed reports whether a task at the place has an entry in the range Index: unended ones have,
// unless they lie in their first place.
func (p Place) IsIndexed(id ID) bool { return !Ended(p.Range) && p != FirstPlace(LaneOf(id), id) }

// AppendKey appends the key of the task's record.
func (p Place) AppendKey(dst []byte, id ID) []byte {
	switch p.Range {
	case Task:
		return AppendTask(dst, p.Group, p.At, id)
	case Scheduled:
		return AppendScheduled(dst, p.At, id)
	default:
		return AppendGrouped(dst, p.Range, p.Group, p.At, id)
	}
}

// ParsePlaceKey reads the key of a task's record, in any range.
func ParsePlaceKey(key []byte) (id ID, p Place, err error) {
	if len(key) == 0 {
		return id, p, malformed("key", key)
	}
	p.Range = key[0]
	switch p.Range {
	case Task:
		p.Group, p.At, id, err = ParseTask(key)
	case Scheduled:
		p.At, id, err = ParseScheduled(key)
	case Blocked, Dead, Done, Canceled:
		p.Group, p.At, id, err = ParseGrouped(key)
	default:
		err = malformed("place", key)
	}
	return id, p, err
}

// Append appends the encoded place.
func (p Place) Append(dst []byte) []byte {
	dst = binary.BigEndian.AppendUint32(append(dst, p.Range), p.Group)
	return binary.BigEndian.AppendUint64(dst, p.At)
}

// ParsePlace reads the value of an index entry.
func ParsePlace(b []byte) (Place, error) {
	if len(b) != PlaceLen || b[0] != Task && b[0] != Scheduled && b[0] != Blocked {
		return Place{}, malformed("place", b)
	}
	return Place{
		Range: b[0],
		Group: binary.BigEndian.Uint32(b[1:]),
		At:    binary.BigEndian.Uint64(b[5:]),
	}, nil
}

// UniqueValue is the holder of an idempotency key.
type UniqueValue struct {
	ID    ID     // if Until is set, the task may no longer exist; see Gone
	Until uint64 // the key is taken at least until then, ms since 1970; 0: until the task has ended
}

// Gone is the ID of no task. It temporarily holds imported idempotency keys with unknown tasks.
// They are in all shards, since their shard does not follow from the hash.
var Gone = ID{6: 0x70, 8: 0x80}

const uniqueValueLen = IDLen + 8

// KeyUntil returns the end of a period for which a task has an idempotency key, ms. The period
// begins at from, but not before the task was produced.
func KeyUntil(id ID, from, period uint64) uint64 { return Later(max(from, MintedAt(id)), period) }

// Append appends the encoded value.
func (v UniqueValue) Append(dst []byte) []byte {
	return binary.BigEndian.AppendUint64(append(dst, v.ID[:]...), v.Until)
}

// ParseUnique is the inverse of Append.
func ParseUnique(b []byte) (v UniqueValue, err error) {
	if len(b) != uniqueValueLen {
		return v, malformed("holder of an idempotency key", b)
	}
	copy(v.ID[:], b)
	v.Until = binary.BigEndian.Uint64(b[IDLen:])
	return v, nil
}

// GroupValue has the turn of a group.
type GroupValue struct {
	Holder  ID   // task with the turn; zero: the first waiting task will get it
	Waiting bool // others wait
}

const groupValueLen = IDLen + 1

// Append appends the encoded value.
func (v GroupValue) Append(dst []byte) []byte {
	return wire.AppendBool(append(dst, v.Holder[:]...), v.Waiting)
}

// ParseGroup is the inverse of Append.
func ParseGroup(b []byte) (v GroupValue, err error) {
	if len(b) != groupValueLen || b[groupValueLen-1] > 1 {
		return v, malformed("turn of a group", b)
	}
	copy(v.Holder[:], b)
	v.Waiting = b[groupValueLen-1] == 1
	return v, nil
}

// AppendLaneNumber appends the lane that precedes the record of a scheduled or blocked task.
func AppendLaneNumber(dst []byte, lane uint32) []byte {
	return binary.BigEndian.AppendUint32(dst, lane)
}

// SplitLane splits the value of a scheduled or blocked task.
func SplitLane(b []byte) (lane uint32, rec []byte, err error) {
	if len(b) < 4 {
		return 0, nil, malformed("record with lane", b)
	}
	return binary.BigEndian.Uint32(b), b[4:], nil
}

// EndedValue begins the value of an ended task; its record follows.
type EndedValue struct {
	Lane   uint32
	At     uint64 // time of the end, ms since 1970
	Result []byte
}

// Append appends the encoded value, without the record.
func (v EndedValue) Append(dst []byte) []byte {
	dst = binary.BigEndian.AppendUint32(dst, v.Lane)
	dst = binary.BigEndian.AppendUint64(dst, v.At)
	return wire.AppendBytes(dst, v.Result)
}

// ParseEnded reads the value of an ended task. Both results alias b.
func ParseEnded(b []byte) (v EndedValue, rec []byte, err error) {
	r := wire.NewReader(b)
	v = EndedValue{Lane: r.Fixed32(), At: r.Fixed64(), Result: r.Bytes()}
	rec = r.Rest()
	if r.Failed() {
		return EndedValue{}, nil, malformed("ended task", b)
	}
	return v, rec, nil
}

// LeaseHeader begins the value of a lease record, and applies to all its leases.
type LeaseHeader struct {
	Local    bool   // granted to the process itself: released at the next Open
	Deadline uint64 // wall clock, ms since 1970; 0: Local, and the process has closed the queue
	Ends     uint64 // the deadline by the shard's clock of leases, ms; 0: granted without a cluster
	Process  uint64 // the process of a cluster that holds the leases; 0: not known
}

// The flags of a lease record.
const (
	leaseLocal   = 1 << iota
	leaseEnds    // Ends follows the deadline
	leaseProcess // Process follows them
)

// Append appends the encoded header.
func (h LeaseHeader) Append(dst []byte) []byte {
	flags := byte(0)
	if h.Local {
		flags |= leaseLocal
	}
	if h.Ends != 0 {
		flags |= leaseEnds
	}
	if h.Process != 0 {
		flags |= leaseProcess
	}
	dst = binary.BigEndian.AppendUint64(append(dst, flags), h.Deadline)
	if h.Ends != 0 {
		dst = binary.BigEndian.AppendUint64(dst, h.Ends)
	}
	if h.Process != 0 {
		dst = binary.BigEndian.AppendUint64(dst, h.Process)
	}
	return dst
}

// LeaseEntry is one lease in a lease record. It is valid while the task's record is at (Lane,
// Since) and was leased Leases-1 times before; otherwise the lease is over. If several records have
// an entry for the same lease, the deadline is that of the one with the largest sequence number.
type LeaseEntry struct {
	ID       ID
	Lane     uint32
	Since    uint64
	Token    uint64
	Leases   uint32 // times leased, this one included
	Attempts uint32 // attempts counted, this one included
	Duration uint64 // ms
	Worker   string // holder of the lease; "": not known
}

// GrantedAt returns when a lease was granted, by the clock of its shard, ms since 1970. A renewal
// does not change the token.
func GrantedAt(token uint64) uint64 { return token >> kindShift }

// The forms of a lease entry. An entryFresh is the first lease of a task in its first place:
// everything except the ID and the duration follows from the record. An entryWorker is no lease: it
// names the holder of the following leases.
const (
	entryFull   = 0
	entryFresh  = 1
	entryWorker = 2
)

// AppendWorker appends the holder of the following leases to the value of a lease record. Leases
// before the first one have an unknown holder.
func AppendWorker(dst []byte, worker string) []byte {
	return wire.AppendBytes(append(dst, entryWorker), worker)
}

// Append appends the encoded entry, without the worker, to the value of the record seq.
func (e LeaseEntry) Append(dst []byte, seq uint64) []byte {
	if e.Token == seq && e.Leases == 1 && e.Attempts == 1 && e.Lane == LaneOf(e.ID) && e.Since == SinceOf(e.ID) {
		dst = append(append(dst, entryFresh), e.ID[:]...)
		return wire.AppendUint(dst, e.Duration)
	}
	dst = append(append(dst, entryFull), e.ID[:]...)
	dst = wire.AppendUint(dst, e.Duration)
	dst = binary.BigEndian.AppendUint32(dst, e.Lane)
	dst = binary.BigEndian.AppendUint64(dst, e.Since)
	dst = binary.BigEndian.AppendUint64(dst, e.Token)
	dst = wire.AppendUint(dst, uint64(e.Leases))
	return wire.AppendUint(dst, uint64(e.Attempts))
}

// ParseLeases reads the value of the lease record seq.
func ParseLeases(seq uint64, b []byte) (LeaseHeader, []LeaseEntry, error) {
	r := wire.NewReader(b)
	flags := r.Byte()
	h := LeaseHeader{Local: flags&leaseLocal != 0, Deadline: r.Fixed64()}
	if flags&leaseEnds != 0 {
		h.Ends = r.Fixed64()
	}
	if flags&leaseProcess != 0 {
		h.Process = r.Fixed64()
	}
	if flags > leaseLocal|leaseEnds|leaseProcess || flags&leaseEnds != 0 && h.Ends == 0 || flags&leaseProcess != 0 && h.Process == 0 {
		r.Fail()
	}
	var entries []LeaseEntry
	worker := ""
	for r.Len() > 0 {
		form := r.Byte()
		if form == entryWorker {
			worker = r.String()
			continue
		}
		e := readLease(r, form, seq)
		e.Worker = worker
		entries = append(entries, e)
	}
	if r.Failed() {
		return LeaseHeader{}, nil, malformed("lease record", b)
	}
	return h, entries, nil
}

// EndLocalLeases returns a lease record of local leases, changed to the state after the process has
// closed the queue; nil: the leases are not local.
func EndLocalLeases(b []byte) []byte {
	const deadlineAt, deadlineEnd = 1, 1 + 8
	if len(b) < deadlineEnd || b[0]&leaseLocal == 0 {
		return nil
	}
	b = bytes.Clone(b)
	clear(b[deadlineAt:deadlineEnd])
	return b
}

func readLease(r *wire.Reader, form byte, seq uint64) LeaseEntry {
	e := LeaseEntry{ID: ReadID(r), Duration: r.Uint()}
	switch form {
	case entryFresh:
		e.Lane, e.Since, e.Token, e.Leases, e.Attempts = LaneOf(e.ID), SinceOf(e.ID), seq, 1, 1
	case entryFull:
		e.Lane, e.Since, e.Token = r.Fixed32(), r.Fixed64(), r.Fixed64()
		e.Leases, e.Attempts = r.Uint32(), r.Uint32()
	default:
		r.Fail()
	}
	return e
}

// LaneOf returns the first lane of a task: bytes 9 to 11 of its ID.
func LaneOf(id ID) uint32 { return uint32(id[9])<<16 | uint32(id[10])<<8 | uint32(id[11]) }

// MaxLane is the largest number of a lane.
const MaxLane = 1<<24 - 1

// The values of the range Wake.
const (
	WakeUp     = iota // the task may go on
	WakeCancel        // the task must be canceled
)

// PendingCanceled is the value in the range Pending of a task that will be canceled.
const PendingCanceled = 1<<64 - 1

// How a parent has ended, as its children see it: the outcomes in a MsgEnded.
const (
	ParentDone = iota
	ParentCanceled
	ParentPinned // done, and its result is kept until the child has ended
	ParentEnded  // in any way, for a task that is suspended until then
)

// The actions of a task when a parent dies.
const (
	HoldOnDead   = iota // it waits
	CancelOnDead        // it is canceled
	RunOnDead           // it goes on as if the parent were completed
	AtAnyEnd            // it is suspended until the parent has ended in any way: no task is produced so
)

// The actions of a task if a parent is gone before the parent has noted the task.
const (
	RunOnMissing    = iota // it goes on as if the parent were completed
	CancelOnMissing        // it is canceled
	RefuseOnMissing        // it is not stored if its producer finds so, and canceled otherwise
)

// MaxPriority is the highest priority of a lane; the lowest one is 0.
const MaxPriority = 9

// ParseTelling parses an entry of the range Telling. end is the range of the ended task.
func ParseTelling(key, value []byte) (parent ID, end byte, err error) {
	if parent, err = ParseByID(key); err == nil {
		end, err = ParseEnd(value)
	}
	return parent, end, err
}

// ParseEnd parses a value of the range Telling.
func ParseEnd(value []byte) (end byte, err error) {
	if len(value) != 1 || !Ended(value[0]) {
		return 0, malformed("end of a task", value)
	}
	return value[0], nil
}
