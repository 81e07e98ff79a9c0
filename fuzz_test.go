package codeq

import (
	"bytes"
	"context"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/call"
	"codeq/internal/crashfs"
	"codeq/internal/engine"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/raftlog"
	"codeq/internal/simtest"
)

// What the fuzzer finds is kept in testdata/fuzz; .ci/fuzz runs all targets.

// loneNode opens a cluster of one node that leads its shards.
func loneNode(t testing.TB, shards int) *Queue {
	network := simtest.NewNet(1, 0)
	host := network.Listen("n")
	votes := simtest.NewVotes()
	q, err := Open("q", inspect.With(&Options{
		Shards: shards, Durability: DurabilityNone, MemTableBytes: 256 << 10,
		Cluster: inspect.With(&Cluster{
			Node: "n", Listener: host, HeartbeatTimeout: minTimeout, CallTimeout: minTimeout,
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

// FuzzServe: an operation that another node has sent, whatever it says, is
// refused or resolved; and the shard goes on.
func FuzzServe(f *testing.F) {
	for _, op := range sampleCalls() {
		kind, args := op.base().kind, op.encode(nil)
		f.Add(byte(kind), args)
	}
	bad := engine.NewTask{Key: engine.LaneKey{Queue: "a"}, Rec: []byte{1<<6 | 1<<5, 1, 'e', 9}} // headers that are not there
	strange := engine.NewTask{Key: engine.LaneKey{Queue: "a", Priority: 200}, Rec: []byte{0}}
	for _, op := range []request{
		&produceOp{completion: newCompletion(callProduce), tasks: []engine.NewTask{bad}}, &produceOp{completion: newCompletion(callProduce), tasks: []engine.NewTask{strange}},
		&messageBatch{completion: newCompletion(callMessages), from: 1, first: 1, messages: []keys.Message{
			{Kind: keys.MsgAdmit, Queue: "a", Record: bad.Rec},
			{Kind: keys.MsgAdmit, Queue: "a", Priority: 200, Record: strange.Rec},
			{Kind: keys.MsgSettings, Queue: "a", Settings: []byte("{}")},
			{Kind: keys.MsgSettings, Queue: "a", Settings: []byte(`{"Rate":-1}`)},
			{Kind: keys.MsgDepend, Parent: keys.ID{1}, Child: keys.ID{2}, Outcome: 77},
		}},
		&messageBatch{completion: newCompletion(callMessages), from: 3, first: 1},
		rule(callConfigure, &call.Configure{Queue: "b", Value: []byte(`{"Concurrency":1}`)}),
		&permitsOp{completion: newCompletion(callPermits), queue: "b", shard: 99},
	} {
		kind, args := op.base().kind, op.encode(nil)
		f.Add(byte(kind), args)
	}
	q := loneNode(f, 3)
	f.Fuzz(func(t *testing.T, kind byte, args []byte) {
		if callKind(kind) == callMember || callKind(kind) == callBarrier { // the shard does as it is told
			return
		}
		op, err := q.requestOf(kind, "caller", bytes.Clone(args)) // the shard keeps what it is given
		if err != nil {
			return
		}
		s := q.shard(0)
		require.NotNil(t, s, "%v", q.replicas[0].group.Failure())
		op.base().reply = func(err error) {
			if err == nil {
				_ = op.encodeReply(nil)
			}
		}
		require.NoError(t, s.inbox.Pass(op))
		for range 3 { // until what follows from it has been done, too
			require.NoError(t, s.probe(func(*shard) error { return nil }))
		}
		if waits, ok := op.(abandoned); ok {
			waits.abandon(s)
		}
		for i, r := range q.replicas { // what it has sent to the others is good
			require.NoError(t, r.group.Failure(), "shard %d", i)
		}
		require.Same(t, s, q.shard(0))
	})
}
