package cluster

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"codeq/internal/snapshot"
	"codeq/internal/store"
)

// snapshotReceiver is the connections on which a group gets the files of a snapshot. When one ends,
// its bytes are kept for the next one, and removed after some time, or as soon as there is no room
// for the rest.
type snapshotReceiver struct {
	bytes atomic.Uint64 // received so far

	mu          sync.Mutex // guards the fields below
	connections int
	unused      *time.Timer // removes the received bytes; nil: there were none since the node was opened
	kept        bool        // the received bytes wait for a connection
	looks       int         // how often unused has checked the room on the disk meanwhile
}

const (
	lookAtRoom = store.LookEvery * time.Millisecond
	keptLooks  = int(keepFiles / lookAtRoom)
)

// begin counts another connection.
func (r *snapshotReceiver) begin() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.connections++
	r.stop()
}

// end counts a connection as ended. look is called until keeps returns false, or there is another
// connection.
func (r *snapshotReceiver) end(look func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.connections--; r.connections > 0 {
		return
	}
	r.kept, r.looks = true, 0
	r.unused = time.AfterFunc(lookAtRoom, look)
}

// keeps reports whether the received bytes stay for now; fits: there is a rest, and room for it.
func (r *snapshotReceiver) keeps(fits bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.kept {
		return true
	}
	if r.looks++; !fits || r.looks >= keptLooks {
		r.kept = false
		return false
	}
	r.unused.Reset(lookAtRoom)
	return true
}

// close is called when no more connections come.
func (r *snapshotReceiver) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stop()
}

// stop stops the removal of the received bytes. REQUIRES: mu is held.
func (r *snapshotReceiver) stop() {
	r.kept = false
	if r.unused != nil {
		r.unused.Stop()
	}
}

var errLaterTerm = errors.New("there is a later term")

// receiveFiles receives the files that another node sends for a group.
func (n *Node) receiveFiles(group int, from net.Conn) {
	if !n.ready.Load() {
		return
	}
	g := n.groups[group]
	g.receiver.begin()
	defer g.receiver.end(g.lookAtReceived)
	err := g.snapshots.Receive(from, raftTimeout, snapshot.Gate{Admit: g.admitFiles, Room: n.room.fits, Next: g.receive})
	if err != nil && n.ctx.Err() == nil {
		n.log.Info("files of a snapshot have not all come", "shard", g.index, "from", from.RemoteAddr(), "err", err)
	}
}

// lookAtReceived removes files that no connection has continued for long, or that have no room for
// their rest.
func (g *Group) lookAtReceived() {
	g.node.contain("end of a transfer", func() {
		rest, receiving := g.snapshots.Missing()
		if !g.receiver.keeps(receiving && g.node.room.fits(rest) == nil) {
			g.snapshots.DropReceived()
		}
	}, nil)
}

// admitFiles reports whether the group already has the content of a snapshot, installed or applied,
// and needs no files. It returns an error if the group refuses the files.
func (g *Group) admitFiles(o snapshot.Offered) (has bool, err error) {
	if err := g.mayReceive(o, 0); err != nil {
		return false, err
	}
	newest, err := g.snapshots.List()
	if err != nil {
		return false, err
	}
	if g.log.holds(o.Index) || len(newest) > 0 && newest[0].Index >= o.Index {
		return true, nil
	}
	if err := g.applied.get().admits(Position{o.Index, o.Term}); err != nil {
		g.Fail(err)
		return false, err
	}
	return false, nil
}

// mayReceive returns an error if so many bytes of files must not be stored. If there is a later
// term, the sender no longer leads the group.
func (g *Group) mayReceive(o snapshot.Offered, bytes int) error {
	if err := g.Failure(); err != nil {
		return err
	}
	if latest := g.latestTerm.Load(); o.Sender < latest {
		return fmt.Errorf("%w: %d, after %d", errLaterTerm, latest, o.Sender)
	}
	if bytes > 0 && g.node.room.full(bytes) {
		return errNoRoom
	}
	return nil
}

// receive is mayReceive for bytes that have come, of the rest of the files. Other writes may have
// taken the room since the transfer began.
func (g *Group) receive(o snapshot.Offered, bytes int, rest int64) error {
	err := g.mayReceive(o, bytes)
	if err == nil {
		err = g.node.room.fits(rest)
	}
	if err == nil {
		g.receiver.bytes.Add(uint64(bytes))
	}
	return err
}
