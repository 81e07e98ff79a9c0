package cluster

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
	"codeq/internal/peer"
	"codeq/internal/wire"
)

// Raft sends the heartbeats of each group to each follower separately. Their cost is not their
// bytes but that each wakes two processes. So the heartbeats of all groups leave a node at the same
// moment, over one connection to each other node; and when those of another node arrive, at once.
//
// Raft's heartbeat is due between a tenth and a fifth of HeartbeatTimeout after the one before, and
// waits for another fifth at most. So a follower has a heartbeat of its leader at least every two
// fifths of the time until either would miss the other, and a stall of three fifths is harmless.
//
// The groups share only the connection: each group answers for itself, when it can. The connection
// may be silent while the node is not. So a heartbeat without an answer after another two fifths is
// sent again, on a connection of its group.

// heartbeatBatches collects heartbeats that leave together. The zero value is ready for use.
type heartbeatBatches struct {
	mu   sync.Mutex      // guards next
	next *heartbeatBatch // nil: no heartbeat waits
}

// heartbeatBatch is some heartbeats that leave together. Each channel is closed when its event
// comes.
type heartbeatBatch struct {
	due  chan struct{} // they have waited for long enough
	left chan struct{} // they leave
	late chan struct{} // they go again if they have not been answered
}

// join returns the batch of the heartbeats that wait, which is due after while at most, and
// should be answered within answer after that.
func (d *heartbeatBatches) join(while, answer time.Duration) *heartbeatBatch {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.next == nil {
		due, late := make(chan struct{}), make(chan struct{})
		d.next = &heartbeatBatch{due, make(chan struct{}), late}
		time.AfterFunc(while, func() { close(due) })
		time.AfterFunc(while+answer, func() { close(late) })
	}
	return d.next
}

// leave sends the heartbeats of a batch, if they have not left; nil: those that wait.
func (d *heartbeatBatches) leave(which *heartbeatBatch) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.next != nil && (which == nil || which == d.next) {
		close(d.next.left)
		d.next = nil
	}
}

// beat sends a heartbeat of Raft, together with those of other groups. While a node does not
// answer, each heartbeat takes a connection of its group: entries follow as soon as one is
// answered, and find a connection that is not lost.
func (t *transport) beat(id raft.ServerID, target raft.ServerAddress, req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse) error {
	n := t.group.node
	if t.group.health.outage(id, req.Term) != nil {
		return t.sendEntries(id, target, req, resp)
	}
	to, err := peerOf(raft.Server{ID: id, Address: target}).target()
	if err != nil {
		return err
	}
	with := n.heartbeats.join(n.c.HeartbeatTimeout/5, 2*n.c.HeartbeatTimeout/5)
	select {
	case <-with.due:
		n.heartbeats.leave(with)
	case <-with.left:
	case <-n.ctx.Done():
		return base.ErrClosed
	}
	sent := time.Now()
	reply, err := n.peer.CallUntil(n.ctx, with.late, nil, to, kindHeartbeat, t.group.appendHeartbeat(nil, req), true)
	if err != nil {
		var remote *peer.RemoteError
		if errors.As(err, &remote) { // its replica has ended
			return t.sendEntries(id, target, req, resp)
		}
		select {
		case <-with.late:
			return t.sendEntries(id, target, req, resp)
		default:
			return err
		}
	}
	r := wire.NewReader(reply)
	resp.Term, resp.LastLog, resp.Success = r.Uint(), r.Uint(), r.Bool()
	wall := r.Uint()
	t.group.health.noteDisk(id, req.Term, time.Duration(min(r.Uint(), maxDiskAge))*time.Millisecond)
	room := readDiskRoom(r)
	if err := r.Done(); err != nil {
		return err
	}
	n.rooms.note(id, room)
	n.noteClock(id, wall, time.Since(sent))
	return nil
}

// maxDiskAge bounds the age in a node's report on its disk, in ms: a hundred years.
const maxDiskAge = 100 * 365 * 24 * 60 * 60 * 1000

func (g *Group) appendHeartbeat(dst []byte, req *raft.AppendEntriesRequest) []byte {
	dst = wire.AppendUint(dst, uint64(g.index))
	dst = wire.AppendUint(dst, req.Term)
	return wire.AppendUint(wire.AppendBytes(dst, req.Addr), g.workHere())
}

// serveHeartbeat passes a heartbeat to its group. The next ones do not wait for it: Raft may have
// to store a term before it answers. Those of this node leave as well, while both processes are
// awake.
func (n *Node) serveHeartbeat(r *peer.Request) error {
	in := wire.NewReader(r.Body)
	shard, term, addr, work := in.Uint(), in.Uint(), in.String(), in.Uint()
	if in.Done() != nil || shard >= uint64(len(n.groups)) {
		return ErrMalformedCall
	}
	n.heartbeats.leave(nil)
	from := Peer{Node: r.From.Name, ID: r.From.ID.String()}
	answer := make(chan raft.RPCResponse, 1)
	heartbeat := raft.RPC{RespChan: answer, Command: &raft.AppendEntriesRequest{
		RPCHeader: raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax, ID: []byte(from.ServerID()), Addr: []byte(addr)},
		Term:      term,
	}}
	n.answer(r, "heartbeat", func() ([]byte, error) {
		g := n.groups[shard]
		g.transport.heartbeat(heartbeat)
		select {
		case a := <-answer:
			if a.Error != nil { // not an error of Raft
				return nil, a.Error
			}
			resp := a.Response.(*raft.AppendEntriesResponse)
			if resp.Success { // the sender is the leader
				g.told.Store(work)
			}
			reply := wire.AppendUint(wire.AppendUint(nil, resp.Term), resp.LastLog)
			reply = wire.AppendUint(wire.AppendBool(reply, resp.Success), n.wallMillis())
			reply = wire.AppendUint(reply, uint64(g.diskAge()/time.Millisecond))
			return n.diskRoom().append(reply), nil
		default: // Raft has been shut down
			return nil, fmt.Errorf("%w: shard %d is not replicated here", base.ErrNotLeader, shard)
		}
	})
	return nil
}
