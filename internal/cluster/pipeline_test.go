package cluster

import (
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
)

// fakePipeline is one of the library to a node that takes some time for each message. As in the
// library, two messages are under way at a time, and the next waits until the answer of the first
// was taken.
type fakePipeline struct {
	takes   time.Duration
	answer  func(*raft.AppendEntriesResponse) // how the node answers
	got     []raft.AppendEntriesRequest
	sent    chan *answered
	answers chan raft.AppendFuture
	closing sync.Once
	closed  chan struct{}
}

// answered is an answer, to be.
type answered struct {
	raft.AppendFuture
	req  *raft.AppendEntriesRequest
	resp *raft.AppendEntriesResponse
	err  chan error // closed once there is an answer, or an error
}

func (a *answered) Request() *raft.AppendEntriesRequest   { return a.req }
func (a *answered) Response() *raft.AppendEntriesResponse { return a.resp }
func (a *answered) Error() error                          { return <-a.err }

func newFakePipeline(takes time.Duration) *fakePipeline {
	p := &fakePipeline{
		takes: takes, answer: func(resp *raft.AppendEntriesResponse) { resp.Success = true },
		sent: make(chan *answered), answers: make(chan raft.AppendFuture), closed: make(chan struct{}),
	}
	go func() {
		for {
			select {
			case a := <-p.sent:
				select {
				case <-time.After(p.takes):
				case <-p.closed:
					a.err <- raft.ErrPipelineShutdown
					return
				}
				p.answer(a.resp)
				close(a.err)
				select {
				case p.answers <- a:
				case <-p.closed:
					return
				}
			case <-p.closed:
				return
			}
		}
	}()
	return p
}

func (p *fakePipeline) AppendEntries(
	req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse,
) (raft.AppendFuture, error) {
	a := &answered{req: req, resp: resp, err: make(chan error, 1)}
	p.got = append(p.got, *req)
	select {
	case p.sent <- a:
		return a, nil
	case <-p.closed:
		return nil, raft.ErrPipelineShutdown
	}
}

func (p *fakePipeline) Consumer() <-chan raft.AppendFuture { return p.answers }

func (p *fakePipeline) Close() error {
	p.closing.Do(func() { close(p.closed) })
	return nil
}

// listenTo takes the answers as Raft does, until one ends the pipeline.
func listenTo(p *pipeline) {
	for {
		select {
		case f := <-p.Consumer():
			if !f.Response().Success {
				return
			}
		case <-p.ended:
			return
		}
	}
}

// TestPipelineEndsWithItsLastAnswer: when Raft listens to no more answers, messages that follow, or
// are under way, do not wait for ever.
func TestPipelineEndsWithItsLastAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		inner := newFakePipeline(time.Second)
		inner.answer = func(*raft.AppendEntriesResponse) {}
		p := newPipeline(inner, loneGroup(crashfs.New(), nil), "b")
		begun := time.Now()
		go listenTo(p)
		var err error
		for err == nil {
			_, err = p.AppendEntries(new(raft.AppendEntriesRequest), new(raft.AppendEntriesResponse))
		}
		require.ErrorIs(t, err, raft.ErrPipelineShutdown)
		require.Equal(t, time.Second, time.Since(begun))
	})
}

// TestPipelineEndsWithItsTerm: a message waits for its answer no longer than the term lasts.
func TestPipelineEndsWithItsTerm(t *testing.T) {
	disk := crashfs.New()
	n := newLoneNode(t, disk, filepath.Join(t.TempDir(), "votes"), new(notes))
	g := openLone(t, n)
	p := newPipeline(newFakePipeline(time.Hour), g, "b")
	req := &raft.AppendEntriesRequest{Term: g.raft.CurrentTerm()}
	_, err := p.AppendEntries(req, new(raft.AppendEntriesResponse))
	require.NoError(t, err)
	ended := make(chan error)
	go func() {
		_, err := p.AppendEntries(req, new(raft.AppendEntriesResponse))
		ended <- err
	}()
	require.NoError(t, n.Close())
	require.ErrorIs(t, <-ended, raft.ErrPipelineShutdown)
}

// slowPipeline takes some time for each message, and gets no answers.
type slowPipeline struct {
	raft.AppendPipeline
	takes time.Duration
}

func (p slowPipeline) AppendEntries(*raft.AppendEntriesRequest, *raft.AppendEntriesResponse) (raft.AppendFuture, error) {
	time.Sleep(p.takes)
	return nil, nil
}

func (p slowPipeline) Consumer() <-chan raft.AppendFuture { return nil }
func (p slowPipeline) Close() error                       { return nil }

// TestCatchUpGivesWay: a node that is behind gets messages at an eighth of the pace, and another
// one does not wait.
func TestCatchUpGivesWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPipeline(slowPipeline{takes: time.Millisecond}, loneGroup(crashfs.New(), nil), "b")
		pace := func(entries []*raft.Log) time.Duration {
			begun := time.Now()
			for range 100 {
				_, err := p.AppendEntries(&raft.AppendEntriesRequest{Entries: entries}, new(raft.AppendEntriesResponse))
				require.NoError(t, err)
			}
			return time.Since(begun)
		}
		require.Equal(t, 100*time.Millisecond, pace(entriesFrom(1, MaxAppend-1)))
		require.Equal(t, 800*time.Millisecond, pace(entriesFrom(1, MaxAppend)))
		halves := entriesFrom(1, 2)
		halves[0].Data = make([]byte, messageBytes)
		require.Equal(t, 900*time.Millisecond, pace(halves), "the first half of each gives way")
		require.NoError(t, p.Close())
	})
}

// TestPipelineLetsRaftLook: after a second Raft goes on behind the sent entries.
func TestPipelineLetsRaftLook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPipeline(slowPipeline{takes: 400 * time.Millisecond}, loneGroup(crashfs.New(), nil), "b")
		req := &raft.AppendEntriesRequest{Entries: entriesFrom(1, 10)}
		for _, e := range req.Entries {
			e.Data = make([]byte, messageBytes)
		}
		_, err := p.AppendEntries(req, new(raft.AppendEntriesResponse))
		require.NoError(t, err)
		require.Len(t, req.Entries, 4)
		require.NoError(t, p.Close())
	})
}

// TestMessagesAreBounded: what Raft sends is divided by bytes; each part has the data of its
// entries, follows the one before, and tells no more than it proves.
func TestMessagesAreBounded(t *testing.T) { synctest.Test(t, messagesAreBounded) }

func messagesAreBounded(t *testing.T) {
	log := loneLog(t, crashfs.New())
	g := log.group
	g.log = log
	sizes := []int{1, 3 << 20, 2 << 20, 9 << 20, 100, messageBytes, 1, 2}
	parts := [][]uint64{{1, 2}, {3}, {4}, {5}, {6}, {7, 8}}
	for i, size := range sizes {
		require.NoError(t, log.StoreLog(&raft.Log{Index: uint64(i + 1), Term: 3, Data: make([]byte, size)}))
	}
	request := func() *raft.AppendEntriesRequest {
		req := &raft.AppendEntriesRequest{Term: 4, LeaderCommitIndex: 7}
		for i, size := range sizes {
			e := new(raft.Log)
			require.NoError(t, log.GetLog(uint64(i+1), e))
			require.Equal(t, size >= 1<<20, len(e.Data) == 0, "Raft has no large data")
			req.Entries = append(req.Entries, e)
		}
		return req
	}
	check := func(part []uint64, m *raft.AppendEntriesRequest) {
		var got []uint64
		for _, e := range m.Entries {
			got = append(got, e.Index)
			require.Len(t, e.Data, sizes[e.Index-1])
			require.Empty(t, e.Extensions)
			require.EqualValues(t, 3, e.Term)
		}
		require.Equal(t, part, got)
		require.Equal(t, part[0]-1, m.PrevLogEntry)
		require.Equal(t, min(7, part[len(part)-1]), m.LeaderCommitIndex)
		require.EqualValues(t, 4, m.Term)
	}

	req := request()
	for _, part := range parts {
		n := fitting(req.Entries)
		m, err := g.message(req, n)
		require.NoError(t, err)
		check(part, m)
		req.PrevLogEntry, req.Entries = part[n-1], req.Entries[n:]
	}
	require.Empty(t, req.Entries)

	inner := newFakePipeline(time.Millisecond)
	lone := loneGroup(crashfs.New(), nil)
	lone.log = log
	p := newPipeline(inner, lone, "b")
	go listenTo(p)
	req = request()
	req.Term = 0 // there is no Raft to ask whether it is over
	_, err := p.AppendEntries(req, new(raft.AppendEntriesResponse))
	require.NoError(t, err)
	require.Len(t, inner.got, len(parts))
	for i, part := range parts {
		inner.got[i].Term = 4
		check(part, &inner.got[i])
		require.Equal(t, min(uint64(i), 1)*3, inner.got[i].PrevLogTerm)
	}
	require.Len(t, req.Entries, len(sizes), "Raft goes on behind them")
	require.NoError(t, p.Close())
}

// TestReferences: an entry that is applied has its data, also a large one, of the right term; and
// no entry is stored without its data.
func TestReferences(t *testing.T) {
	log := loneLog(t, crashfs.New())
	m := new(notes)
	g := loneGroup(crashfs.New(), m)
	g.log = log
	whole := entryOf(1, 1, 1, string(make([]byte, 1<<20)))
	require.NoError(t, log.StoreLog(whole))
	var ref raft.Log
	require.NoError(t, log.GetLog(1, &ref))
	require.Empty(t, ref.Data)
	require.Nil(t, fsm{g}.Apply(&ref))
	require.Len(t, m.applied, 1)
	require.Equal(t, whole.Data[EntryHeader:], m.applied[0].Data)

	require.ErrorIs(t, log.StoreLog(&raft.Log{Index: 2, Term: 1, Extensions: ref.Extensions}), errNotStored)
	require.NoError(t, log.DeleteRange(1, 1))
	require.Equal(t, errHeld, fsm{g}.Apply(&ref), "what has been applied is not read")
	req := &raft.AppendEntriesRequest{Entries: []*raft.Log{&ref}}
	_, err := g.message(req, 1)
	require.ErrorIs(t, err, raft.ErrLogNotFound)
	require.NoError(t, log.StoreLog(&raft.Log{Index: 1, Term: 2, Data: whole.Data}))
	_, err = g.message(req, 1)
	require.ErrorContains(t, err, "term 2")
	require.NoError(t, g.Failure())
}

// TestNewest: how many entries may be under way depends on their sizes.
func TestNewest(t *testing.T) {
	log := loneLog(t, crashfs.New())
	sizes := append(make([]int, 300), messageBytes, messageBytes-1, 1, 0, 9<<20)
	for i, size := range sizes {
		require.NoError(t, log.StoreLog(&raft.Log{Index: uint64(i + 1), Term: 1, Data: make([]byte, size)}))
	}
	require.EqualValues(t, 4*MaxAppend, log.newest(300, 4))
	require.EqualValues(t, 10, log.newest(10, 4), "there are no more")
	require.EqualValues(t, 1, log.newest(305, 1))
	require.EqualValues(t, 4, log.newest(305, 2))
	require.EqualValues(t, 5+63, log.newest(305, 3), "with empty ones before")
	require.Zero(t, log.newest(0, 4))
}

// TestRepeatedRequestWaits: a request that says nothing new waits for an entry, and is sent only if
// the node misses heartbeats, or after a while. The pipeline never answers it in place of the node.
func TestRepeatedRequestWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := loneLog(t, crashfs.New())
		require.NoError(t, log.StoreLogs(entriesFrom(1, 3)))
		g := loneGroup(crashfs.New(), nil)
		g.log = log
		inner := newFakePipeline(0)
		p := newPipeline(inner, g, "b")
		var answers atomic.Int32
		go func() {
			for {
				select {
				case <-p.Consumer():
					answers.Add(1)
				case <-p.ended:
					return
				}
			}
		}()
		sent := func(commit uint64) (messages int, took time.Duration) {
			before, begun := len(inner.got), time.Now()
			req := &raft.AppendEntriesRequest{PrevLogEntry: 3, PrevLogTerm: 1, LeaderCommitIndex: commit}
			_, err := p.AppendEntries(req, new(raft.AppendEntriesResponse))
			require.NoError(t, err)
			return len(inner.got) - before, time.Since(begun)
		}
		require.Equal(t, 1, first(sent(2)))
		require.Equal(t, 1, first(sent(2)), "not all is committed")
		require.Equal(t, 1, first(sent(3)), "the node does not know that")

		messages, took := sent(3)
		require.Equal(t, longRest, took)
		require.Equal(t, 1, messages, "it was sent long ago")

		missed := time.AfterFunc(time.Second, func() { g.health.note("b", 0, false) })
		defer missed.Stop()
		messages, took = sent(3)
		require.Equal(t, time.Second, took)
		require.Equal(t, 1, messages)
		messages, took = sent(3)
		require.Zero(t, took)
		require.Equal(t, 1, messages, "it is still missed")
		g.health.note("b", 0, true)

		stored := time.AfterFunc(time.Second, func() { _ = log.StoreLog(entryOf(4, 1, 1, "")) })
		defer stored.Stop()
		messages, took = sent(3)
		require.Equal(t, time.Second, took)
		require.Zero(t, messages, "Raft sends the entry next")
		time.Sleep(time.Minute)
		require.EqualValues(t, len(inner.got), answers.Load())
		require.NoError(t, p.Close())
	})
}

// TestRefusalEndsRest: a node that has refused the last message, or was not reached by it, is sent
// it again soon, although there is nothing new.
func TestRefusalEndsRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := loneGroup(crashfs.New(), nil)
		g.log = loneLog(t, crashfs.New())
		g.node.c.HeartbeatTimeout = 500 * time.Millisecond
		require.NoError(t, g.log.StoreLogs(entriesFrom(1, 3)))
		inner := newFakePipeline(100 * time.Millisecond)
		inner.answer = func(*raft.AppendEntriesResponse) {}
		p := newPipeline(inner, g, "b")
		go listenTo(p)
		req := raft.AppendEntriesRequest{PrevLogEntry: 3, PrevLogTerm: 1, LeaderCommitIndex: 3}
		_, err := p.AppendEntries(&req, new(raft.AppendEntriesResponse))
		require.NoError(t, err)
		begun := time.Now()
		_, err = p.AppendEntries(&req, new(raft.AppendEntriesResponse))
		require.ErrorIs(t, err, raft.ErrPipelineShutdown)
		require.Equal(t, g.node.c.HeartbeatTimeout, time.Since(begun))
	})
}

func first(messages int, _ time.Duration) int { return messages }

// TestLargeEntryIsSentAlone: no two that are larger than a message are under way.
func TestLargeEntryIsSentAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := loneLog(t, crashfs.New())
		for i := range uint64(3) {
			require.NoError(t, log.StoreLog(&raft.Log{Index: i + 1, Term: 1, Data: make([]byte, messageBytes+1)}))
		}
		g := loneGroup(crashfs.New(), nil)
		g.log = log
		inner := newFakePipeline(time.Second)
		p := newPipeline(inner, g, "b")
		go listenTo(p)
		begun := time.Now()
		for i := range uint64(3) {
			e := new(raft.Log)
			require.NoError(t, log.GetLog(i+1, e))
			_, err := p.AppendEntries(&raft.AppendEntriesRequest{Entries: []*raft.Log{e}}, new(raft.AppendEntriesResponse))
			require.NoError(t, err)
			require.Equal(t, time.Duration(i)*time.Second, time.Since(begun))
		}
		require.NoError(t, p.Close())
		_, err := p.AppendEntries(&raft.AppendEntriesRequest{Entries: []*raft.Log{{Data: make([]byte, messageBytes+1)}}}, nil)
		require.ErrorIs(t, err, raft.ErrPipelineShutdown)
	})
}
