package codeq

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/call"
	"codeq/internal/cluster"
	"codeq/internal/crashfs"
	"codeq/internal/dispatch"
	"codeq/internal/engine"
	"codeq/internal/entries"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/listing"
	"codeq/internal/manifest"
	"codeq/internal/permits"
	"codeq/internal/raftlog"
	"codeq/internal/record"
	"codeq/internal/simtest"
	"codeq/internal/testbase"
)

// decodable returns an empty operation of a kind, as the called node creates it for decoding.
func decodable(kind callKind) request {
	return verbs[kind].new("caller")
}

// sampleCalls returns an operation of every kind, with all of its arguments and with an outcome.
func sampleCalls() map[string]request {
	id := func(n byte) ID { return ID{15: n} }
	receipt := Receipt{ID: id(9), Token: 1 << 60}
	receipts := []engine.Receipt{receipt.inner()}
	task := prepare(&Task{Queue: "a", Tenant: "t", Priority: 3, Payload: []byte("p"), RunAt: time.UnixMilli(5)}, nil)
	tied := prepare(&Task{Queue: "a", Group: "g", Unique: Unique{Key: "k", Replace: true}, After: []ID{id(1)}, OnDead: CancelOnDead, OnMissing: RefuseOnMissing}, nil)
	notes := &record.Notes{Done: 1, Total: 2, Text: "t", At: 5, Metadata: map[string]string{"k": "v"}, Logs: []record.LogLine{{At: 5, Level: -4, Attempt: 2, Text: "t"}}}
	info := &TaskInfo{ID: id(3), State: Done, Attempts: 2, At: time.UnixMilli(7).UTC(), Result: []byte("r"), Task: Task{Queue: "a"}}
	numbered := call.NumberedStep{Number: 3, Step: record.Step{Kind: record.StepResult, Name: "a", At: 5, Result: []byte("b")}}
	return map[string]request{
		"produce": &produceOp{completion: newCompletion(callProduce),
			Produce: call.Produce{
				Tasks: []engine.NewTask{task, tied}, Produced: engine.Produced{IDs: []keys.ID{id(1), id(2)}, Duplicates: []int{1}},
				Call: keys.CallNumber{Node: "caller", Incarnation: 7, Seq: 8, Low: 3},
			},
		},
		"call": &callOp{
			completion: newCompletion(callCall), Produce: call.Produce{Tasks: []engine.NewTask{task}, Produced: engine.Produced{IDs: []keys.ID{id(1)}}},
			lost: ErrClosed, outcome: engine.Outcome{State: engine.Dead, LastError: "e", Attempts: 2},
		},
		"claim": &claimOp{completion: newCompletion(callClaim), Claim: dispatch.Claim{
			Queues: []string{"a", "b"}, Weights: []int{1, 2}, Duration: 30_000, Max: 5, NoWait: true, Holder: engine.Holder{Local: true, Worker: "w"}, Remote: true,
			Grants: []engine.Grant{{Receipt: receipt.inner(), LaneKey: &engine.LaneKey{Queue: "a", Tenant: "t", Priority: 3}, Attempt: 2, Deadline: 99, Timeout: 7, Rec: []byte("rec")}},
		}},
		"complete":       &completeOp{completion: newCompletion(callComplete), Complete: call.Complete{Receipt: receipt.inner(), Notes: notes, Result: []byte("r"), Next: []engine.NewTask{task, tied}, Retention: -1, StillRuns: true}},
		"fail":           &failOp{completion: newCompletion(callFail), Fail: call.Fail{Receipt: receipt.inner(), How: engine.FailRetry | engine.StillRuns, Policy: &record.Policy{MaxAttempts: 3, RetryFirst: true}, Wait: -1, Cause: "why", Notes: notes}},
		"suspend":        &failOp{completion: newCompletion(callFail), Fail: call.Fail{Receipt: receipt.inner(), How: engine.FailSuspend, Wait: 5, Step: numbered}},
		"note":           rule(callNote, &call.Note{Receipt: receipt.inner(), Notes: notes}),
		"extend":         rule(callExtend, &call.Extend{Receipt: receipt.inner(), Duration: 5}),
		"leases":         leaseSample(receipt),
		"renew":          rule(callRenew, &call.Renew{Receipts: receipts, Duration: 5, Lost: receipts, Errs: []error{engine.LeaseLost(receipt.inner(), true)}}),
		"alter":          rule(callAlter, &call.Alter{ID: id(1), How: engine.AlterRunAt, AlterTo: engine.AlterTo{Arg: 77, Step: "charge"}}),
		"await":          endedAwait(id(1), engine.Outcome{State: engine.Done, Result: []byte("r"), Attempts: 3}),
		"stats":          rule(callStats, &call.Stats{Counts: []engine.QueueCounts{{Queue: "a", Counts: keys.Counts{Ready: 1, Canceled: 2}}}}),
		"info":           rule(callInfo, &call.Info{Infos: []engine.QueueInfo{{Queue: "a", Counts: keys.Counts{Ready: 1, Canceled: 2}, Oldest: 3, Totals: keys.Totals{4, keys.Unhandled: 5}}}}),
		"totals":         rule(callTotals, &call.Totals{Names: []string{"a", "b"}, Infos: []engine.QueueInfo{{Queue: "a", Totals: keys.Totals{4, keys.Unhandled: 5}}}}),
		"days":           rule(callDays, &call.Days{Queue: "a", Days: []keys.TotalsValue{{Day: 1, All: keys.Totals{2, keys.Unhandled: 5}, OfDay: keys.Totals{1}}, {Day: 2, All: keys.Totals{2}, OfDay: keys.Totals{1}}}}),
		"idle":           &idleOp{completion: newCompletion(callIdle), Idle: call.Idle{Idleness: engine.Idleness{Queues: []string{"a"}, Arrived: 4}, Epoch: 7, Waited: true}},
		"releaseKey":     rule(callReleaseKey, &call.ReleaseKey{Hash: [16]byte{1}, Key: "k"}),
		"setSchedule":    scheduleCall(),
		"deleteSchedule": rule(callDeleteSchedule, &call.DeleteSchedule{Name: "s"}),
		"pauseSchedule":  rule(callPauseSchedule, &call.PauseSchedule{Name: "s", Paused: true}),
		"schedules":      rule(callSchedules, &schedulesPart{call.Schedules[ScheduleInfo]{After: "s", More: true, Infos: []ScheduleInfo{{Schedule: Schedule{Name: "s", Cron: "@daily"}, LastError: "no zone"}}}}),
		"findSchedule":   rule(callFindSchedule, &call.FindSchedule{Name: "s", Value: keys.ScheduleValue{Cron: "@daily", Jitter: 2, Record: []byte{}}}),
		"messages": &messageBatch{completion: newCompletion(callMessages), Messages: call.Messages{From: 2, First: 5, List: []keys.Message{
			{Kind: keys.MsgEnded, Parent: keys.ID(id(1)), Child: keys.ID(id(2)), Outcome: 1},
		}}},
		"get":       readOf(callRead, &listing.One[TaskInfo]{ID: keys.ID(id(3)), Task: info}),
		"page":      readOf(callPage, pagedOf(listed{Task: info, At: 4, Size: 3})),
		"find":      readOf(callFind, &listing.One[TaskInfo]{ByKey: true, Key: [16]byte{1, 2}, Task: info}),
		"many":      readOf(callMany, &listing.Many[TaskInfo]{IDs: []keys.ID{id(3), id(4)}, Tasks: []*TaskInfo{info, nil}}),
		"deadKinds": readOf(callDeadKinds, &listing.DeadKinds{Queue: "a", Kinds: []listing.DeadKind{{Text: "t", Count: keys.KindCount{Count: 3, At: 5, Last: id(3)}}, {Other: true}}}),
		"alterMany": rule(callAlterMany, &call.AlterMany{BulkAlteration: engine.BulkAlteration{IDs: []keys.ID{id(1), id(2)}, How: engine.AlterMove, States: record.SetOf(engine.Ready), AlterTo: engine.AlterTo{Queue: "b"}, N: 1, Failed: 1}}),
		"use":       readOf(callUse, &listing.Use{Queue: "a", Counts: keys.Counts{Ready: 1}, Keys: 2, Claims: 3}),
		"index":     &indexOp{completion: newCompletion(callIndex), Index: call.Index{Applied: 12}},
		"interest":  &interestOp{completion: newCompletion(callInterest), Interest: call.Interest{Node: "n", Wants: keys.InterestValue{Kinds: uint64(allKinds), Incarnation: 2, Number: 3}, Gone: true}},
		"settings":  rule(callSettings, &call.Settings{Queue: "a", Value: []byte("v")}),
		"configure": rule(callConfigure, &call.Configure{Queue: "a", Value: []byte("v"), Late: true}),
		"adopt":     rule(callAdopt, &call.Adopt{Queue: "a", Value: []byte("v")}),
		"permits": &permitsOp{completion: newCompletion(callPermits),
			PermitRequest: dispatch.PermitRequest{
				Queue: "a", Shard: 2,
				Answer:  permits.Answer{Granted: 3, Over: true},
				Request: permits.Request{Report: permits.Report{Epoch: 1, Seq: 2, Try: 3, Held: 4, Unused: 1, Spent: 9}, Want: 5, Wait: true, Rank: 4, Share: 720720},
			},
		},
		"askPermits": &askPermitsOp{completion: newCompletion(callAskPermits), Question: permits.Question{Queue: "a", Settings: []byte("v"), Report: permits.Report{Epoch: 1, Held: 4, Unused: 1, Idle: time.Hour}}},
		"member":     &memberOp{completion: newCompletion(callMember), how: cluster.RemoveNode, peer: cluster.Peer{Node: "n", Address: "addr"}},
		"barrier":    &barrierOp{completion: newCompletion(callBarrier), Barrier: call.Barrier{ID: 7, Index: call.Index{Applied: 9}}},
		"taken":      &takenOp{completion: newCompletion(callTaken), Taken: call.Taken{To: 3}},
		"clock":      rule(callClock, &call.Clock{Time: 7}),
		"missing":    rule(callMissing, &call.Missing{IDs: []keys.ID{id(1), id(2)}, Missing: []keys.ID{id(2)}}),
		"step":       &stepOp{completion: newCompletion(callStep), Step: call.Step{Receipt: receipt.inner(), Of: numbered}},
		"cursors":    &stepOp{completion: newCompletion(callStep), Step: call.Step{Receipt: receipt.inner(), Cursors: record.Cursors{"c": []byte("v")}.Append(nil)}},
		"signal":     rule(callSignal, &call.Signal{ID: keys.ID(id(1)), Name: "s", Value: []byte("v")}),
		"resume":     &resumeOp{completion: newCompletion(callResume), Resume: call.Resume{ID: 7}},
	}
}

func leaseSample(r Receipt) request {
	lost := completion{kind: callExtend, err: engine.LeaseLost(r.inner(), true)}
	return &leaseOps{completion: newCompletion(callLeases), ops: []request{
		&completeOp{completion: newCompletion(callComplete), Complete: call.Complete{Receipt: r.inner(), Result: []byte("r"), StillRuns: true}},
		&failOp{completion: newCompletion(callFail), Fail: call.Fail{Receipt: r.inner(), How: engine.FailDead, Cause: "why"}},
		&ruling{lost, &call.Extend{Receipt: r.inner(), Duration: 5}},
	}}
}

func endedAwait(id ID, o engine.Outcome) request {
	return &awaitOp{completion: newCompletion(callAwait), Await: entries.Await{ID: id, Outcome: o}}
}

func scheduleCall() request {
	s := Schedule{Name: "s", Every: time.Minute, Task: Task{Queue: "a"}}
	times, err := s.check(&Limits{Payload: 1, Headers: 1 << 10, Name: 10}, 5)
	if err != nil {
		panic(err)
	}
	return rule(callSetSchedule, &call.SetSchedule{Name: "s", Value: s.value(), Times: times})
}

// TestCallsTravel: an operation and its outcome stay the same when nodes send them.
func TestCallsTravel(t *testing.T) {
	seen := make(map[callKind]bool)
	for name, op := range sampleCalls() {
		t.Run(name, func(t *testing.T) {
			kind, args := op.base().kind, op.Append(nil)
			seen[kind] = true
			there := decodable(kind)
			require.NoError(t, parse(args, there.Read))
			again := there.Append(nil)
			require.Same(t, &verbs[kind], there.verb())
			require.Equal(t, args, again, "arguments")

			reply := op.AppendReply(nil)
			back := decodable(kind)
			require.NoError(t, parse(args, back.Read)) // the caller knows the arguments
			require.NoError(t, parse(reply, back.ReadReply))
			require.Equal(t, reply, back.AppendReply(nil), "outcome")
			if len(args) > 0 {
				require.Error(t, parse(args[:len(args)-1], decodable(kind).Read), "a part of the arguments")
			}
		})
	}
	for kind := callProduce; kind < endOfRequests; kind++ {
		if kind == 9 || kind == 42 || kind == 43 { // retired, or not used
			continue
		}
		require.NotNil(t, verbs[kind].new, "call %d is no verb", kind)
		require.True(t, seen[kind], "call %d has no sample", kind)
	}
}

// TestFarTimesTravel: the time bounds of a list may be any times, and the RunAt of a task may be
// the latest possible time. Nodes in any time zone read the same times.
func TestFarTimesTravel(t *testing.T) {
	local := time.Local
	time.Local = time.FixedZone("east", 12*3600)
	defer func() { time.Local = local }()
	from, to := time.Date(-5, 1, 1, 0, 0, 0, 1, time.UTC), time.Unix(1<<60, 7)
	last := time.Date(9999, 12, 31, 23, 59, 59, 999_999_999, time.UTC).UnixMilli()
	info := &TaskInfo{State: Scheduled, Task: Task{RunAt: msTime(uint64(last))}, At: msTime(uint64(last))}
	for name, op := range map[string]*readOp{
		"get":  readOf(callRead, &listing.One[TaskInfo]{Task: info}),
		"page": readOf(callPage, pageOf(listing.Query{State: engine.Scheduled, Tenants: []string{"", "\xff"}, From: from, To: to}, listed{Task: info})),
	} {
		there, back := verbs[op.kind].new("").(*readOp), verbs[op.kind].new("").(*readOp)
		args := op.Append(nil)
		require.NoError(t, parse(args, there.Read), name)
		require.NoError(t, parse(args, back.Read))
		require.NoError(t, parse(op.AppendReply(nil), back.ReadReply))
		var got *TaskInfo
		switch l := op.lookup.(type) {
		case *listing.One[TaskInfo]:
			got = back.lookup.(*listing.One[TaskInfo]).Task
		case *lister:
			sent := there.lookup.(*lister)
			require.True(t, sent.From.Equal(from) && sent.To.Equal(to))
			require.Equal(t, l.Tenants, sent.Tenants)
			got = back.lookup.(*lister).Page[0].Task
		}
		require.Equal(t, 9999, got.At.Year(), "in UTC")
		require.EqualValues(t, last, got.RunAt.UnixMilli())
	}
	there := newLister(listing.Query{})
	require.NoError(t, parse(newLister(listing.Query{State: engine.Done}).Append(nil), there.Read))
	require.True(t, there.From.IsZero() && there.To.IsZero())
}

// TestNoTaskTravels: an answer without its task is malformed.
func TestNoTaskTravels(t *testing.T) {
	require.Error(t, parse([]byte("null"), listing.NewOne(false, taskInfo).ReadReply))
	reply := pageOf(listing.Query{State: engine.Done}, listed{Task: new(TaskInfo)}).AppendReply(nil)
	for _, page := range []string{"[null]", "[{}]", `[{"Task":null}]`} {
		l := newLister(listing.Query{State: engine.Done})
		require.NoError(t, parse(reply, l.ReadReply))
		l.Page = nil
		at := bytes.Index(reply, []byte("[{"))
		require.Error(t, parse(append(bytes.Clone(reply[:at]), page...), l.ReadReply), page)
		require.Empty(t, l.Page)
	}
}

// TestErrorsTravel: the errors that callers check are the same on every node.
func TestErrorsTravel(t *testing.T) {
	receipt := Receipt{ID: ID{1}, Token: 2}
	for _, err := range []error{
		ErrEmpty, fmt.Errorf("%w: x", ErrLeaseLost), engine.LeaseLost(receipt.inner(), true), ErrNotFound, ErrNotWaiting, ErrCanceled,
		ErrNotLeader, ErrUncertain, ErrCorrupt, ErrDiskFull, ErrNotMember, &keys.IncarnationOverError{Node: "n", Latest: 1 << 63},
		fmt.Errorf("shard 0: %w: x", cluster.ErrBehind),
	} {
		got := decodeError(encodeError(err))
		require.Equal(t, err.Error(), got.Error())
		for _, sentinel := range call.SentErrors[1:] {
			require.Equal(t, errors.Is(err, sentinel), errors.Is(got, sentinel), "%v as %v", err, sentinel)
		}
	}
	require.ErrorIs(t, decodeError(encodeError(ErrClosed)), ErrNotLeader, "another node will lead")
	require.ErrorIs(t, decodeError(encodeError(ErrFailed)), ErrNotLeader)
	for _, cause := range []error{ErrFailed, ErrClosed, ErrNotLeader, ErrNotFound, ErrDiskFull, ErrLeaseLost} {
		got := decodeError(encodeError(fmt.Errorf("%w: shard 0: %w", ErrUncertain, cause)))
		require.ErrorIs(t, got, ErrUncertain)
		require.NotErrorIs(t, got, cause, "it would say that nothing was stored")
	}
	require.ErrorIs(t, decodeError(encodeError(errMalformedCall)), ErrFormat, "the call is new")
	require.Equal(t, ErrNotLeader, call.SentErrors[call.CodeNotLeader])
	code, text := encodeError(cluster.ErrBehind)
	require.ErrorIs(t, decodeError(code, text), cluster.ErrBehind)
	require.EqualValues(t, call.CodeNotLeader, code, "builds that do not know it ask again")
	lost := decodeError(encodeError(fmt.Errorf("%w: %w", ErrNotLeader, ErrPowerLost)))
	require.ErrorIs(t, lost, ErrNotLeader)
	require.ErrorIs(t, lost, ErrPowerLost)
	duplicate := &DuplicateError{Key: "k", ID: ID{3}, Index: 2}
	var d *DuplicateError
	require.ErrorAs(t, decodeError(encodeError(fmt.Errorf("x: %w", duplicate))), &d)
	require.Equal(t, duplicate, d)
	var invalid *InvalidError
	require.ErrorAs(t, decodeError(encodeError(&InvalidError{"f", 3, "l"})), &invalid)
	require.Equal(t, &InvalidError{"f", "3", "l"}, invalid)
	var over *keys.IncarnationOverError
	require.ErrorAs(t, decodeError(encodeError(&keys.IncarnationOverError{Node: "n", Latest: 1 << 63})), &over)
	require.Equal(t, &keys.IncarnationOverError{Node: "n", Latest: 1 << 63}, over)
	require.EqualError(t, decodeError(encodeError(errors.New("odd"))), "odd")
	old := decodeError(encodeError(errMalformedCall))
	require.ErrorIs(t, old, ErrFormat, "what this build sends, another one cannot read")
	require.ErrorContains(t, old, "another version")
}

// FuzzCalls: bytes from another node are refused, or they are an operation or an outcome that this
// node can send on unchanged.
func FuzzCalls(f *testing.F) {
	for _, op := range sampleCalls() {
		kind, args := op.base().kind, op.Append(nil)
		f.Add(byte(kind), args, op.AppendReply(nil))
	}
	f.Fuzz(func(t *testing.T, kind byte, args, reply []byte) {
		if kind >= byte(endOfRequests) || verbs[kind].new == nil {
			return
		}
		op := decodable(callKind(kind))
		var err error
		testbase.BoundDecode(t, len(args), func() { err = parse(args, op.Read) })
		if err != nil {
			return
		}
		sent := op.Append(nil)
		second := decodable(callKind(kind))
		require.NoError(t, parse(sent, second.Read))
		again := second.Append(nil)
		require.Equal(t, sent, again)

		testbase.BoundDecode(t, len(reply), func() { err = parse(reply, op.ReadReply) })
		if err != nil {
			return
		}
		sent = op.AppendReply(nil)
		require.NoError(t, parse(sent, second.ReadReply))
		require.Equal(t, string(sent), string(second.AppendReply(nil)))
	})
}

// FuzzErrors: an error of another node or process stays the same when this process sends it on to a
// program.
func FuzzErrors(f *testing.F) {
	for _, err := range []error{ErrEmpty, cluster.ErrBehind, engine.LeaseLost(engine.Receipt{}, true), &DuplicateError{Key: "k"}, &InvalidError{"f", 3, "l"}} {
		code, text := encodeError(err)
		f.Add(code, text)
	}
	f.Add(byte(call.CodeDuplicate), "{")
	f.Add(byte(call.FirstOfOwn), "closed")
	f.Add(byte(0), errMalformedCall.Error())
	f.Add(byte(call.CodeDuplicate), errMalformedCall.Error())
	f.Fuzz(func(t *testing.T, code byte, text string) {
		err := decodeError(code, text)
		again := decodeError(encodeOwnError(err))
		require.Equal(t, err.Error(), again.Error())
		for _, sentinel := range call.SentErrors[1:] {
			require.Equal(t, errors.Is(err, sentinel), errors.Is(again, sentinel), "%v", sentinel)
		}
	})
}

// TestClusterOptions: Open refuses invalid options before it creates anything.
func TestClusterOptions(t *testing.T) {
	dir := t.TempDir() + "/q"
	peers := []Peer{{"a", "1:1"}, {"a", "2:2"}}
	for field, c := range map[string]Cluster{
		"Cluster.Node":             {Listen: "x:1"},
		"Cluster.Listen":           {Node: "a"},
		"Cluster.Peers":            {Node: "a", Listen: "x:1", Peers: peers},
		"Cluster.HeartbeatTimeout": {Node: "a", Listen: "x:1", HeartbeatTimeout: time.Millisecond},
		"Cluster.ElectionTimeout":  {Node: "a", Listen: "x:1", HeartbeatTimeout: time.Second, ElectionTimeout: time.Second - 1},
		"Cluster.CallTimeout":      {Node: "a", Listen: "x:1", CallTimeout: -1},
	} {
		_, err := Open(dir, &Options{Cluster: &c})
		var invalid *InvalidError
		require.ErrorAs(t, err, &invalid, field)
		require.Equal(t, field, invalid.Field)
	}
	_, err := Open(dir, &Options{Cluster: &Cluster{Node: "n\xff", Listen: "x:1"}})
	require.ErrorIs(t, err, ErrInvalid, "the directory would keep another name")
	_, err = Open(dir, &Options{Cluster: &Cluster{Node: "a", Listen: "x:1", Join: true}})
	require.ErrorIs(t, err, ErrInvalid)
	_, err = Open(dir, &Options{Cluster: &Cluster{Node: "a", Listen: "x:1", Peers: []Peer{{"a", "x:1"}, {"b", "y:1"}, {"c", "y:1"}}}})
	require.EqualError(t, err, `codeq: invalid Cluster.Peers: address of c: "y:1" (allowed: an address of its own)`)
	require.NoDirExists(t, dir)

	o, err := (&Options{Cluster: &Cluster{Node: "a", Listen: "x:1"}}).withDefaults()
	require.NoError(t, err)
	require.Equal(t, DurabilityDisk, o.Durability)
	require.Equal(t, 3, manifest.NewShards(true, true, 64))
	require.Equal(t, 500*time.Millisecond, o.Cluster.HeartbeatTimeout)
	require.Equal(t, 500*time.Millisecond, o.Cluster.ElectionTimeout)
	require.Equal(t, 10*time.Second, o.Cluster.CallTimeout)
}

func readOf(kind callKind, l lookup) *readOp {
	return &readOp{completion: newCompletion(kind), lookup: l}
}

// pageOf returns a lister that has read a page.
func pageOf(q listing.Query, page ...listed) *lister {
	l := newLister(q)
	l.Page = page
	return l
}

// pagedOf returns a lister in the middle of a list, with a filter, limits and positions.
func pagedOf(page ...listed) *lister {
	l := pageOf(listing.Query{State: engine.Done, Queue: "a", Tenants: []string{"t"}}, page...)
	at := func(n byte) *listing.Position {
		return &listing.Position{Key: listing.Key{Queue: "a", Tenant: "t", Priority: 3, ID: keys.ID{n}}, At: 1 << 60, End: n == 1}
	}
	l.Filter = listing.Filter{Group: "g", Key: "k", Kind: "ship", Error: "#", Newest: true, NoPayload: true}
	l.Groups, l.Tasks, l.Scan, l.Bytes = 5, 6, 7, 8
	l.After, l.Reached, l.Records, l.ReadBytes = at(1), at(2), 9, 10
	return l
}

// The findings of the fuzzer are in testdata/fuzz; .ci/fuzz runs all targets.

// loneNode opens a cluster of one node that leads its shards.
func loneNode(t testing.TB, shards int) *Queue {
	network := simtest.NewNet(1, 0)
	host := network.Listen("n")
	votes := simtest.NewVotes()
	q, err := Open("q", inspect.With(&Options{
		Shards: shards, Durability: DurabilityNone, MemTableBytes: 256 << 10,
		Cluster: inspect.With(&Cluster{
			Node: "n", Listener: host, HeartbeatTimeout: cluster.MinTimeout, CallTimeout: cluster.MinTimeout,
		}, inspect.Private{
			Dial:  func(ctx context.Context, addr string) (net.Conn, error) { return network.Dial(ctx, host, addr) },
			Votes: func(string) (raftlog.Stables, error) { return votes, nil },
		}),
	}, inspect.Private{FS: crashfs.New()}))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, q.Close()) })
	require.Eventually(t, func() bool { return len(q.led()) == shards }, 10*time.Second, time.Millisecond)
	return q
}

// TestTriedAgain: an operation that an owner has answered may be tried again in the same process,
// and is answered then, too. Those that wait here for ever are given up at once.
func TestTriedAgain(t *testing.T) {
	q := loneNode(t, 1)
	s := q.shard(0)
	for name, sample := range sampleCalls() {
		kind := sample.base().kind
		if kind == callMember || kind == callBarrier { // the shard obeys
			continue
		}
		op, err := q.requestOf(byte(kind), "caller", sample.Append(nil))
		require.NoError(t, err, name)
		answered := make(chan error, 2)
		op.base().reply = func(err error) { answered <- err }
		for range 2 {
			require.NoError(t, s.inbox.Pass(op))
			if waiter, ok := op.(abandoned); ok && (op.verb().is(waits) || kind == callClaim) { // for nothing here
				waiter.abandon(s)
				break
			}
			select {
			case <-answered:
			case <-time.After(10 * time.Second):
				require.Fail(t, "no answer", name)
			}
			tryAgain(op)
		}
		require.NoError(t, s.probe(func(*shard) error { return nil }), name)
	}
}

// FuzzServe: a shard refuses or resolves any operation of another node, and continues.
func FuzzServe(f *testing.F) {
	for _, op := range sampleCalls() {
		kind, args := op.base().kind, op.Append(nil)
		f.Add(byte(kind), args)
	}
	// The headers of this record are missing.
	bad := engine.NewTask{Key: engine.LaneKey{Queue: "a"}, Rec: []byte{1<<6 | 1<<5, 1, 'e', 9}}
	strange := engine.NewTask{Key: engine.LaneKey{Queue: "a", Priority: 200}, Rec: []byte{0}}
	for _, op := range []request{
		&produceOp{completion: newCompletion(callProduce), Produce: call.Produce{Tasks: []engine.NewTask{bad}}}, &produceOp{completion: newCompletion(callProduce), Produce: call.Produce{Tasks: []engine.NewTask{strange}}},
		&messageBatch{completion: newCompletion(callMessages), Messages: call.Messages{From: 1, First: 1, List: []keys.Message{
			{Kind: keys.MsgAdmit, Queue: "a", Record: bad.Rec},
			{Kind: keys.MsgAdmit, Queue: "a", Priority: 200, Record: strange.Rec},
			{Kind: keys.MsgSettings, Queue: "a", Settings: []byte("{}")},
			{Kind: keys.MsgSettings, Queue: "a", Settings: []byte(`{"Rate":-1}`)},
			{Kind: keys.MsgDepend, Parent: keys.ID{1}, Child: keys.ID{2}, Outcome: 77},
		}}},
		&messageBatch{completion: newCompletion(callMessages), Messages: call.Messages{From: 3, First: 1}},
		rule(callConfigure, &call.Configure{Queue: "b", Value: []byte(`{"Concurrency":1}`)}),
		&permitsOp{completion: newCompletion(callPermits), PermitRequest: dispatch.PermitRequest{Queue: "b", Shard: 99}},
	} {
		kind, args := op.base().kind, op.Append(nil)
		f.Add(byte(kind), args)
	}
	q := loneNode(f, 3)
	f.Fuzz(func(t *testing.T, kind byte, args []byte) {
		// The shard obeys these calls.
		if callKind(kind) == callMember || callKind(kind) == callBarrier {
			return
		}
		op, err := q.requestOf(kind, "caller", bytes.Clone(args)) // the shard keeps args
		if err != nil {
			return
		}
		s := q.shard(0)
		require.NotNil(t, s, "%v", q.replicas[0].group.Failure())
		op.base().reply = func(err error) {
			if err == nil {
				_ = op.AppendReply(nil)
			}
		}
		require.NoError(t, s.inbox.Pass(op))
		for range 3 { // until its follow-up work is done, too
			require.NoError(t, s.probe(func(*shard) error { return nil }))
		}
		if waits, ok := op.(abandoned); ok {
			waits.abandon(s)
		}
		for i, r := range q.replicas { // its messages to the other shards are valid
			require.NoError(t, r.group.Failure(), "shard %d", i)
		}
		require.Same(t, s, q.shard(0))
	})
}
