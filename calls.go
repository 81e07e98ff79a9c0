package codeq

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"codeq/internal/keys"
	"codeq/internal/peer"
	"codeq/internal/record"
	"codeq/internal/wire"
)

// How operations, and what has become of them, travel between nodes. What
// stands here is the arguments and results of each operation, encoder beside
// decoder; what they mean is where the operation is.

// request is an operation whose caller waits for its outcome, and may do so on
// another node.
type request interface {
	operation
	base() *completion
	// encode appends the arguments.
	encode(dst []byte) (callKind, []byte)
	decode(b []byte) error
	// encodeReply appends what resolve has decided, if it was not an error.
	encodeReply(dst []byte) []byte
	decodeReply(b []byte) error
	// repeatable reports whether the operation may be resolved twice with no
	// other effect than once.
	repeatable() bool
	// again prepares the operation for another try.
	again()
}

// abandoned is a request that may wait for long, and whose caller may give up.
type abandoned interface{ abandon() }

// callKind says which operation a call is.
type callKind byte

const (
	callProduce callKind = iota + 1
	callClaim
	callComplete
	callFail
	callExtend
	callRenew
	callCancel
	callAlter
	callAwait
	callBulk
	callStats
	callIdle
	callReleaseKey
	callSetSchedule
	callDeleteSchedule
	callSchedules
	callParcel
	callRead
	callIndex
	callInterest
	callSettings
	callConfigure
	callAdopt
	callMember
	callPermits
	callAskPermits
	endOfRequests

	// Of a node, and not of a shard.
	callJoin = endOfRequests + iota
	callState
)

// callKinds make the operation of a call, to be decoded.
var callKinds = [endOfRequests]func(*node, *peer.Request) request{
	callProduce:        func(n *node, r *peer.Request) request { return &produceOp{origin: r.From, shards: n.shards()} },
	callClaim:          newRemoteClaim,
	callComplete:       func(n *node, _ *peer.Request) request { return &completeOp{shards: n.shards()} },
	callFail:           func(*node, *peer.Request) request { return new(failOp) },
	callExtend:         func(*node, *peer.Request) request { return new(extendOp) },
	callRenew:          func(*node, *peer.Request) request { return new(renewOp) },
	callCancel:         func(*node, *peer.Request) request { return new(cancelOp) },
	callAlter:          func(*node, *peer.Request) request { return new(alterOp) },
	callAwait:          func(*node, *peer.Request) request { return new(awaitOp) },
	callBulk:           func(*node, *peer.Request) request { return new(bulkOp) },
	callStats:          func(*node, *peer.Request) request { return new(statsOp) },
	callIdle:           func(*node, *peer.Request) request { return new(idleOp) },
	callReleaseKey:     func(*node, *peer.Request) request { return new(releaseKeyOp) },
	callSetSchedule:    func(*node, *peer.Request) request { return new(setScheduleOp) },
	callDeleteSchedule: func(*node, *peer.Request) request { return new(deleteScheduleOp) },
	callSchedules:      func(*node, *peer.Request) request { return new(schedulesOp) },
	callParcel:         func(*node, *peer.Request) request { return new(parcel) },
	callRead:           func(*node, *peer.Request) request { return new(readOp) },
	callSettings:       func(*node, *peer.Request) request { return new(settingsOp) },
	callConfigure:      func(*node, *peer.Request) request { return new(configureOp) },
	callAdopt:          func(*node, *peer.Request) request { return new(adoptOp) },
	callMember:         func(*node, *peer.Request) request { return new(memberOp) },
	callIndex:          func(*node, *peer.Request) request { return new(indexOp) },
	callPermits:        func(*node, *peer.Request) request { return new(permitsOp) },
	callAskPermits:     func(*node, *peer.Request) request { return new(askPermitsOp) },
	callInterest:       func(*node, *peer.Request) request { return new(interestOp) },
}

// The defaults: an operation without results, that must not be repeated.

func (c *completion) encodeReply(dst []byte) []byte { return dst }
func (c *completion) decodeReply(b []byte) error    { return wire.NewReader(b).Done() }
func (c *completion) repeatable() bool              { return false }
func (c *completion) again()                        { c.err = nil }

func appendReceipt(dst []byte, r Receipt) []byte {
	return wire.AppendUint(append(dst, r.ID[:]...), r.Token)
}

func readReceipt(r *wire.Reader) Receipt {
	return Receipt{ID: ID(keys.ReadID(r)), Token: r.Uint()}
}

func appendIndexes(dst []byte, list []int) []byte { return keys.AppendIndexes(dst, list) }

func appendNames(dst []byte, names []string) []byte {
	dst = wire.AppendUint(dst, uint64(len(names)))
	for _, name := range names {
		dst = wire.AppendBytes(dst, name)
	}
	return dst
}

func readNames(r *wire.Reader) []string {
	n := r.Count(1)
	if n == 0 {
		return nil
	}
	names := make([]string, n)
	for i := range names {
		names[i] = r.String()
	}
	return names
}

// appendTasks appends new tasks. What binds them to others is in their records.
func appendTasks(dst []byte, tasks []newTask) []byte {
	dst = wire.AppendUint(dst, uint64(len(tasks)))
	for i := range tasks {
		t := &tasks[i]
		dst = wire.AppendBytes(dst, t.key.queue)
		dst = wire.AppendBytes(dst, t.key.tenant)
		dst = append(dst, t.key.priority)
		dst = wire.AppendBool(dst, t.tied != nil)
		dst = wire.AppendBytes(dst, t.rec)
	}
	return dst
}

// readTasks reads new tasks, whose records alias the message.
func readTasks(r *wire.Reader, shards int) ([]newTask, error) {
	n := r.Count(5)
	if n == 0 {
		return nil, nil
	}
	tasks := make([]newTask, n)
	tied := false
	for i := range tasks {
		t := &tasks[i]
		t.key = laneKey{queue: r.String(), tenant: r.String(), priority: r.Byte()}
		bound := r.Bool()
		t.rec = r.Bytes()
		head, err := record.DecodeHead(t.rec)
		if err != nil {
			return nil, err
		}
		t.runAt = head.RunAt
		if bound {
			if err := t.tie(shards); err != nil {
				return nil, err
			}
			tied = true
		}
	}
	if tied {
		findTwins(tasks)
	}
	return tasks, nil
}

// tie finds in the record of a task what binds it to others.
func (t *newTask) tie(shards int) error {
	rec, err := record.Decode(t.rec)
	if err != nil {
		return err
	}
	t.tied = &tied{Ties: rec.Ties, onDead: OnDead(rec.OnDead), home: -1, twin: -1}
	if home, bound := homeOf(&rec.Ties, shards); bound {
		t.tied.home = home
	}
	for _, p := range rec.Parents {
		t.tied.parents = append(t.tied.parents, p)
	}
	return nil
}

func (op *produceOp) encode(dst []byte) (callKind, []byte) {
	dst = wire.AppendUint(dst, op.call.session)
	dst = wire.AppendUint(dst, op.call.seq)
	dst = wire.AppendUint(dst, op.call.low)
	return callProduce, appendTasks(dst, op.tasks)
}

func (op *produceOp) decode(b []byte) (err error) {
	r := wire.NewReader(b)
	op.call = callNumber{node: op.origin, session: r.Uint(), seq: r.Uint(), low: r.Uint()}
	if op.tasks, err = readTasks(r, op.shards); err != nil {
		return err
	}
	return r.Done()
}

func (op *produceOp) encodeReply(dst []byte) []byte {
	return appendIndexes(keys.AppendIDs(dst, op.ids), op.duplicates)
}

func (op *produceOp) decodeReply(b []byte) error {
	r := wire.NewReader(b)
	for _, id := range keys.ReadIDs(r) {
		op.ids = append(op.ids, id)
	}
	op.duplicates = append(op.duplicates, keys.ReadIndexes(r)...)
	if len(op.ids) != len(op.tasks) {
		return fmt.Errorf("%w: %d IDs for %d tasks", wire.ErrMalformed, len(op.ids), len(op.tasks))
	}
	return r.Done()
}

func (op *produceOp) repeatable() bool { return op.call.seq != 0 }
func (op *produceOp) again()           { op.ids, op.duplicates, op.err = op.ids[:0], op.duplicates[:0], nil }

func (op *completeOp) encode(dst []byte) (callKind, []byte) {
	dst = wire.AppendBytes(appendReceipt(dst, op.receipt), op.result)
	return callComplete, appendTasks(dst, op.next)
}

func (op *completeOp) decode(b []byte) (err error) {
	r := wire.NewReader(b)
	op.receipt, op.result = readReceipt(r), r.Bytes()
	if op.next, err = readTasks(r, op.shards); err != nil {
		return err
	}
	return r.Done()
}

// repeatable: whichever is applied ends the lease, and the other one finds it lost.
func (op *completeOp) repeatable() bool { return true }
func (op *failOp) repeatable() bool     { return true }

func (op *failOp) encode(dst []byte) (callKind, []byte) {
	dst = append(appendReceipt(dst, op.receipt), byte(op.how))
	return callFail, wire.AppendBytes(wire.AppendInt(dst, op.wait), op.cause)
}

func (op *failOp) decode(b []byte) error {
	r := wire.NewReader(b)
	op.receipt, op.how, op.wait, op.cause = readReceipt(r), failure(r.Byte()), r.Int(), r.String()
	return r.Done()
}

func (op *extendOp) encode(dst []byte) (callKind, []byte) {
	return callExtend, wire.AppendUint(appendReceipt(dst, op.receipt), op.duration)
}

func (op *extendOp) decode(b []byte) error {
	r := wire.NewReader(b)
	op.receipt, op.duration = readReceipt(r), r.Uint()
	return r.Done()
}

func (op *extendOp) repeatable() bool { return true }

func appendReceipts(dst []byte, list []Receipt) []byte {
	dst = wire.AppendUint(dst, uint64(len(list)))
	for _, receipt := range list {
		dst = appendReceipt(dst, receipt)
	}
	return dst
}

func readReceipts(r *wire.Reader) []Receipt {
	list := make([]Receipt, r.Count(keys.IDLen+1))
	for i := range list {
		list[i] = readReceipt(r)
	}
	return list
}

func (op *renewOp) encode(dst []byte) (callKind, []byte) {
	return callRenew, appendReceipts(wire.AppendUint(dst, op.duration), op.receipts)
}

func (op *renewOp) decode(b []byte) error {
	r := wire.NewReader(b)
	op.duration, op.receipts = r.Uint(), readReceipts(r)
	return r.Done()
}

func (op *renewOp) encodeReply(dst []byte) []byte {
	dst = appendReceipts(dst, op.lost)
	for _, err := range op.errs {
		dst = wire.AppendBool(dst, errors.Is(err, ErrCanceled))
	}
	return dst
}

func (op *renewOp) decodeReply(b []byte) error {
	r := wire.NewReader(b)
	op.lost = readReceipts(r)
	for _, receipt := range op.lost {
		op.errs = append(op.errs, leaseLost(receipt, r.Bool()))
	}
	return r.Done()
}

func (op *renewOp) repeatable() bool { return true }
func (op *renewOp) again()           { op.lost, op.errs, op.err = nil, nil, nil }

func (op *cancelOp) encode(dst []byte) (callKind, []byte) {
	return callCancel, append(dst, op.id[:]...)
}

func (op *cancelOp) decode(b []byte) error {
	r := wire.NewReader(b)
	op.init(ID(keys.ReadID(r)))
	return r.Done()
}

func (op *alterOp) encode(dst []byte) (callKind, []byte) {
	return callAlter, wire.AppendUint(append(append(dst, op.id[:]...), byte(op.how)), op.arg)
}

func (op *alterOp) decode(b []byte) error {
	r := wire.NewReader(b)
	id, how, arg := ID(keys.ReadID(r)), alteration(r.Byte()), r.Uint()
	if err := r.Done(); err != nil {
		return err
	}
	if how >= endOfAlterations {
		return wire.ErrMalformed
	}
	op.init(id, how, arg)
	return nil
}

func (op *awaitOp) encode(dst []byte) (callKind, []byte) { return callAwait, append(dst, op.id[:]...) }

func (op *awaitOp) decode(b []byte) error {
	r := wire.NewReader(b)
	op.init(ID(keys.ReadID(r)))
	return r.Done()
}

func (op *awaitOp) encodeReply(dst []byte) []byte { return op.outcome.append(dst) }

func (op *awaitOp) decodeReply(b []byte) error {
	r := wire.NewReader(b)
	op.outcome = readOutcome(r)
	return r.Done()
}

func (op *awaitOp) repeatable() bool { return true }
func (op *awaitOp) abandon()         { op.gone.Store(true) }

func (o *Outcome) append(dst []byte) []byte {
	dst = wire.AppendBytes(append(dst, byte(o.State)), o.Result)
	return wire.AppendUint(wire.AppendBytes(dst, o.Error), uint64(o.Attempts))
}

// readOutcome reads an outcome that shares nothing with the message.
func readOutcome(r *wire.Reader) Outcome {
	o := Outcome{State: State(r.Byte())}
	if b := r.Bytes(); len(b) > 0 {
		o.Result = slices.Clone(b)
	}
	o.Error, o.Attempts = r.String(), int(r.Uint())
	return o
}

func (op *bulkOp) encode(dst []byte) (callKind, []byte) {
	return callBulk, keys.AppendIDs(append(dst, byte(op.how)), op.ids)
}

func (op *bulkOp) decode(b []byte) error {
	r := wire.NewReader(b)
	op.how = alteration(r.Byte())
	for _, id := range keys.ReadIDs(r) {
		op.ids = append(op.ids, id)
	}
	if op.how >= endOfAlterations {
		return wire.ErrMalformed
	}
	return r.Done()
}

func (op *bulkOp) encodeReply(dst []byte) []byte { return wire.AppendUint(dst, uint64(op.n)) }

func (op *bulkOp) decodeReply(b []byte) error {
	r := wire.NewReader(b)
	op.n = int(r.Uint())
	return r.Done()
}

func (op *bulkOp) again() { op.next, op.n, op.err = 0, 0, nil }

func (op *statsOp) encode(dst []byte) (callKind, []byte) { return callStats, dst }
func (op *statsOp) decode(b []byte) error                { return wire.NewReader(b).Done() }

func (op *statsOp) encodeReply(dst []byte) []byte {
	dst = wire.AppendUint(dst, uint64(len(op.counts)))
	for i := range op.counts {
		qc := &op.counts[i]
		dst = wire.AppendBytes(dst, qc.queue)
		var b [keys.CountersLen]byte
		keys.CountersValue{Counts: qc.counts}.Put(b[:])
		dst = append(dst, b[:]...)
	}
	return dst
}

func (op *statsOp) decodeReply(b []byte) error {
	r := wire.NewReader(b)
	for range r.Count(1 + keys.CountersLen) {
		name := r.String()
		v, err := keys.ParseCounters(r.Take(keys.CountersLen))
		if err != nil {
			return err
		}
		op.counts = append(op.counts, queueCounts{name, v.Counts})
	}
	return r.Done()
}

func (op *statsOp) repeatable() bool { return true }
func (op *statsOp) again()           { op.counts, op.err = nil, nil }

func (op *idleOp) encode(dst []byte) (callKind, []byte) { return callIdle, appendNames(dst, op.queues) }

func (op *idleOp) decode(b []byte) error {
	r := wire.NewReader(b)
	op.queues = readNames(r)
	return r.Done()
}

func (op *idleOp) encodeReply(dst []byte) []byte {
	return wire.AppendUint(wire.AppendBool(dst, op.waited), op.arrived)
}

func (op *idleOp) decodeReply(b []byte) error {
	r := wire.NewReader(b)
	op.waited, op.arrived = r.Bool(), r.Uint()
	return r.Done()
}

func (op *idleOp) repeatable() bool { return true }
func (op *idleOp) abandon()         { op.gone.Store(true) }

// again says that the caller has waited, whatever the next try finds: while there
// was no leader, tasks may have come and gone.
func (op *idleOp) again() { op.waited, op.err = true, nil }

func (op *releaseKeyOp) encode(dst []byte) (callKind, []byte) {
	return callReleaseKey, wire.AppendBytes(append(dst, op.hash[:]...), op.key)
}

func (op *releaseKeyOp) decode(b []byte) error {
	r := wire.NewReader(b)
	copy(op.hash[:], r.Take(len(op.hash)))
	op.key = r.String()
	return r.Done()
}

func (op *setScheduleOp) encode(dst []byte) (callKind, []byte) {
	return callSetSchedule, wire.AppendBytes(wire.AppendBytes(dst, op.name), op.value.Append(nil))
}

func (op *setScheduleOp) decode(b []byte) error {
	r := wire.NewReader(b)
	name := r.String()
	value, err := keys.ParseScheduleValue(r.Bytes())
	if err := errors.Join(err, r.Done()); err != nil {
		return err
	}
	op.name, op.value = name, value
	op.times, err = timesOf(&value)
	return err
}

func (op *setScheduleOp) repeatable() bool { return true }

func (op *deleteScheduleOp) encode(dst []byte) (callKind, []byte) {
	return callDeleteSchedule, wire.AppendBytes(dst, op.name)
}

func (op *deleteScheduleOp) decode(b []byte) error {
	r := wire.NewReader(b)
	op.name = r.String()
	return r.Done()
}

func (op *schedulesOp) encode(dst []byte) (callKind, []byte) { return callSchedules, dst }
func (op *schedulesOp) decode(b []byte) error                { return wire.NewReader(b).Done() }

// sentSchedule is a ScheduleInfo whose error travels as text.
type sentSchedule struct {
	ScheduleInfo
	Err string
}

func (op *schedulesOp) encodeReply(dst []byte) []byte {
	sent := make([]sentSchedule, len(op.infos))
	for i, info := range op.infos {
		if info.Err != nil {
			sent[i].Err = info.Err.Error()
		}
		info.Err = nil
		sent[i].ScheduleInfo = info
	}
	return appendJSON(dst, sent)
}

func (op *schedulesOp) decodeReply(b []byte) error {
	var sent []sentSchedule
	if err := json.Unmarshal(b, &sent); err != nil {
		return err
	}
	for _, s := range sent {
		info := s.ScheduleInfo
		if s.Err != "" {
			info.Err = errors.New(s.Err)
		}
		op.infos = append(op.infos, info)
	}
	return nil
}

func (op *schedulesOp) repeatable() bool { return true }
func (op *schedulesOp) again()           { op.infos, op.err = nil, nil }

// appendJSON appends a value that can be encoded.
func appendJSON(dst []byte, v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic("codeq: a value without a JSON form: " + err.Error())
	}
	return append(dst, b...)
}

func (p *parcel) encode(dst []byte) (callKind, []byte) {
	dst = wire.AppendUint(wire.AppendUint(dst, uint64(p.from)), p.first)
	dst = wire.AppendUint(dst, uint64(len(p.messages)))
	for i := range p.messages {
		dst = wire.AppendBytes(dst, p.messages[i].Append(nil))
	}
	return callParcel, dst
}

func (p *parcel) decode(b []byte) error {
	r := wire.NewReader(b)
	from := r.Uint()
	p.first = r.Uint()
	n := r.Count(2)
	for range n {
		m, err := keys.ParseMessage(r.Bytes())
		if err != nil {
			return err
		}
		p.messages = append(p.messages, m)
	}
	if from >= maxShards {
		return wire.ErrMalformed
	}
	p.from = int(from)
	return r.Done()
}

func (p *parcel) repeatable() bool { return true }
func (p *parcel) again()           { p.taken, p.err = 0, nil }

func (op *readOp) encode(dst []byte) (callKind, []byte) {
	if op.list == nil {
		return callRead, append(append(dst, 0), op.id[:]...)
	}
	l := op.list
	dst = wire.AppendBytes(append(dst, 1), appendJSON(nil, &l.opts))
	return callRead, appendSpans(wire.AppendBool(dst, l.begun), l.spans)
}

func (op *readOp) decode(b []byte) error {
	r := wire.NewReader(b)
	if r.Byte() == 0 {
		op.id = ID(keys.ReadID(r))
		return r.Done()
	}
	op.list = new(lister)
	if err := json.Unmarshal(r.Bytes(), &op.list.opts); err != nil {
		return err
	}
	op.list.begun, op.list.spans = r.Bool(), readSpans(r)
	if _, ok := listOrders[op.list.opts.State]; !ok {
		return wire.ErrMalformed
	}
	return r.Done()
}

// sentTask is a task of a list as it travels.
type sentTask struct {
	*TaskInfo
	Order uint64
}

func (op *readOp) encodeReply(dst []byte) []byte {
	if op.list == nil {
		return appendJSON(dst, op.task)
	}
	sent := make([]sentTask, len(op.list.page))
	for i, t := range op.list.page {
		sent[i] = sentTask{t.TaskInfo, t.at}
	}
	return appendJSON(appendSpans(dst, op.list.spans), sent)
}

func (op *readOp) decodeReply(b []byte) error {
	if op.list == nil {
		return json.Unmarshal(b, &op.task)
	}
	r := wire.NewReader(b)
	spans := readSpans(r)
	var sent []sentTask
	if err := json.Unmarshal(r.Rest(), &sent); err != nil {
		return err
	}
	op.list.begun, op.list.spans = true, spans
	for _, t := range sent {
		op.list.page = append(op.list.page, listed{t.TaskInfo, t.Order})
	}
	return nil
}

func (op *readOp) repeatable() bool { return true }

func (op *settingsOp) encode(dst []byte) (callKind, []byte) {
	return callSettings, wire.AppendBytes(dst, op.queue)
}

func (op *settingsOp) decode(b []byte) error {
	r := wire.NewReader(b)
	op.queue = r.String()
	return r.Done()
}

func (op *settingsOp) encodeReply(dst []byte) []byte { return append(dst, op.value...) }

func (op *settingsOp) decodeReply(b []byte) error {
	if op.value = b; len(b) == 0 {
		op.value = nil
	}
	return nil
}

func (op *settingsOp) repeatable() bool { return true }
func (op *settingsOp) again()           { op.value, op.err = nil, nil }

func (op *configureOp) encode(dst []byte) (callKind, []byte) {
	return callConfigure, wire.AppendBytes(wire.AppendBytes(dst, op.queue), op.value)
}

func (op *configureOp) decode(b []byte) error {
	r := wire.NewReader(b)
	op.queue, op.value = r.String(), r.Bytes()
	return r.Done()
}

func (op *configureOp) encodeReply(dst []byte) []byte { return wire.AppendBool(dst, op.late) }

func (op *configureOp) decodeReply(b []byte) error {
	r := wire.NewReader(b)
	op.late = r.Bool()
	return r.Done()
}

func (op *configureOp) again() { op.late, op.err = false, nil }

func (op *adoptOp) encode(dst []byte) (callKind, []byte) {
	return callAdopt, wire.AppendBytes(wire.AppendBytes(dst, op.queue), op.value)
}

func (op *adoptOp) decode(b []byte) error {
	r := wire.NewReader(b)
	op.queue, op.value = r.String(), r.Bytes()
	return r.Done()
}

func (op *adoptOp) repeatable() bool { return true }

func appendSpans(dst []byte, spans []span) []byte {
	dst = wire.AppendUint(dst, uint64(len(spans)))
	for _, sp := range spans {
		dst = wire.AppendBytes(wire.AppendBytes(dst, sp.from), sp.to)
	}
	return dst
}

func readSpans(r *wire.Reader) []span {
	spans := make([]span, r.Count(2))
	for i := range spans {
		spans[i] = span{r.Bytes(), r.Bytes()}
	}
	return spans
}

// Errors travel as a code and a text.

var errMalformedCall = errors.New("codeq: malformed call of another node")

// sentErrors are those that callers branch on, by code.
var sentErrors = [...]error{
	nil, ErrEmpty, ErrLeaseLost, ErrNotFound, ErrNotWaiting, ErrCanceled, ErrNotLeader, ErrUncertain, ErrCorrupt,
}

const (
	codeLeaseCanceled = 100 + iota // ErrLeaseLost and ErrCanceled
	codeDuplicate
	codeInvalid
)

func encodeError(err error) (code byte, text string) {
	var duplicate *DuplicateError
	var invalid *InvalidError
	switch {
	case errors.As(err, &duplicate):
		return codeDuplicate, string(appendJSON(nil, duplicate))
	case errors.As(err, &invalid):
		sent := *invalid
		sent.Value = fmt.Sprint(sent.Value)
		return codeInvalid, string(appendJSON(nil, &sent))
	case errors.Is(err, ErrLeaseLost) && errors.Is(err, ErrCanceled):
		return codeLeaseCanceled, err.Error()
	case errors.Is(err, ErrClosed), errors.Is(err, ErrFailed): // another node will lead
		return encodeError(fmt.Errorf("%w: %v", ErrNotLeader, err))
	}
	for code, sentinel := range sentErrors {
		if sentinel != nil && errors.Is(err, sentinel) {
			return byte(code), err.Error()
		}
	}
	return 0, err.Error()
}

func decodeError(code byte, text string) error {
	switch {
	case code == codeDuplicate:
		err := new(DuplicateError)
		if json.Unmarshal([]byte(text), err) == nil {
			return err
		}
	case code == codeInvalid:
		err := new(InvalidError)
		if json.Unmarshal([]byte(text), err) == nil {
			return err
		}
	case code == codeLeaseCanceled:
		return &remoteError{text, []error{ErrLeaseLost, ErrCanceled}}
	case int(code) < len(sentErrors) && code > 0:
		return &remoteError{text, []error{sentErrors[code]}}
	}
	return &remoteError{text, nil}
}

// remoteError is an error of another node. Its text begins with that of what it wraps.
type remoteError struct {
	text string
	is   []error
}

func (e *remoteError) Error() string   { return e.text }
func (e *remoteError) Unwrap() []error { return e.is }
