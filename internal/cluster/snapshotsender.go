package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
	"codeq/internal/container/slowlock"
	"codeq/internal/snapshot"
)

// A node that lacks more than the log holds gets the files of the leader's store, on a connection
// of their own, and then, in place of the snapshot, their manifest by Raft. The goroutine that
// replicates to the node waits meanwhile; heartbeats and votes go on, at either end.
//
// So that the node can then continue with the log, and does not lack more than the log holds again,
// no other snapshot is taken until it has caught up: Raft deletes log only with a snapshot. The log
// may grow meanwhile by the size of the files. If it grows more, the link is slower than the log,
// and the files that were sent are useless.

// snapshotSender is the files that the leader of a group sends, and the nodes that need the log
// behind them.
type snapshotSender struct {
	turn    slowlock.Lock // held while a snapshot is taken, or a checkpoint made
	holding atomic.Bool   // there is such a node
	held    atomic.Uint64 // bytes that the log may grow beyond its size for these nodes

	mu     sync.Mutex // guards the fields below
	files  *sharedFiles
	behind map[raft.ServerID]bool // whether the node has all of the files
	// furthest is the progress of a node: in the files by the bytes sent, and then in the log.
	furthest map[raft.ServerID]uint64
	idle     *time.Timer // ends the transfer when no node has made progress for keepFiles
}

// sharedFiles is a checkpoint that is sent to several nodes. Guarded by snapshotSender.mu.
type sharedFiles struct {
	*snapshot.Checkpoint
	users int
	over  chan struct{} // closed when they are no longer sent
}

// keepFiles is how long files, sent or received, are kept for a connection that continues with
// them. The log may be kept for as long for a node that does not come.
const keepFiles = 5 * time.Minute

var (
	errSending      = errors.New("the log behind the last snapshot is kept for nodes that get its files")
	errNewerFiles   = errors.New("the snapshot has been replaced by one whose files are sent")
	errFilesGivenUp = errors.New("its files have been given up")
)

// InstallSnapshot implements raft.Transport. The content of a snapshot is the manifest of the files
// that have been sent.
func (t *transport) InstallSnapshot(
	id raft.ServerID, target raft.ServerAddress, req *raft.InstallSnapshotRequest, resp *raft.InstallSnapshotResponse, _ io.Reader,
) error {
	to, err := reach(id, target)
	if err != nil {
		return err
	}
	manifest, err := t.group.sendFiles(raft.Server{ID: id, Address: target}, req)
	if err != nil {
		return err
	}
	if err := t.group.withholds(req.Term); err != nil {
		return err
	}
	message := *req
	message.Size = int64(len(manifest))
	if err := t.NetworkTransport.InstallSnapshot(id, to, &message, resp, bytes.NewReader(manifest)); err != nil {
		return err
	}
	if resp.Success {
		t.group.sender.installed(id)
	}
	return nil
}

// sendFiles sends the files of the snapshot that Raft will install on a node, over several
// connections as long as each makes more progress than all before, and returns their manifest.
// Otherwise Raft tries again, with ever longer pauses.
func (g *Group) sendFiles(to raft.Server, req *raft.InstallSnapshotRequest) (manifest []byte, err error) {
	for again := (base.Patience{}); ; again.Wait(g.node.ctx, nil) {
		g.awaitContact(to.ID, req.Term)
		if err := g.maySend(to.ID, req.Term); err != nil {
			return nil, err
		}
		files, err := g.filesFor(to.ID, req.LastLogIndex)
		if err != nil {
			return nil, err
		}
		further, err := g.trySending(files, to, req.Term)
		g.sender.release(files)
		if err == nil {
			return files.Manifest, nil
		}
		if !further || errors.Is(err, snapshot.ErrRefused) || errors.Is(err, errFilesGivenUp) {
			return nil, fmt.Errorf("send files of snapshot %d: %w", req.LastLogIndex, err)
		}
		g.node.log.Info("files of a snapshot go on", "shard", g.index, "to", to.ID, "err", err)
	}
}

// maySend returns an error if the files for a node are useless by now.
func (g *Group) maySend(to raft.ServerID, term uint64) error {
	if err := g.Failure(); err != nil {
		return err
	}
	if g.raft.State() != raft.Leader {
		return raft.ErrNotLeader
	}
	if err := g.isIn(term); err != nil {
		return err
	}
	members, err := g.members()
	if err != nil {
		return err
	}
	for _, m := range members {
		if m.ID == to {
			return nil
		}
	}
	return fmt.Errorf("shard %d: node %s is no member", g.index, to)
}

// trySending sends the missing files to a node on one connection. It reports whether it has sent
// more than any connection before.
func (g *Group) trySending(files *sharedFiles, to raft.Server, term uint64) (further bool, err error) {
	target, err := peerOf(to).target()
	if err != nil {
		return false, err
	}
	n := g.node
	ctx, cancel := context.WithCancelCause(n.ctx)
	defer cancel(nil)
	defer func() {
		if cause := context.Cause(ctx); err != nil && cause != nil {
			err = cause
		}
	}()
	n.run("watch of a transfer", func() { cancel(g.endOfSending(ctx, files, to.ID, term)) }, cancel)
	conn, err := n.peer.OpenFiles(ctx, target, g.index)
	if err != nil {
		return false, err
	}
	defer func() { _ = conn.Close() }() // the sent bytes have been acknowledged
	t := files.Transfer(conn, raftTimeout)
	defer context.AfterFunc(ctx, func() { t.Fail(context.Canceled) })()
	if err := t.Offer(term); err != nil {
		return false, err
	}
	n.run("answer of a receiver", t.Listen, t.Fail)
	err = t.Send(func(offset int64) error {
		further = g.sender.moves(to.ID, uint64(offset)) || further
		return g.maySend(to.ID, term)
	})
	return further, err
}

// endOfSending returns the reason why files are no longer sent, or nil when ctx ends.
func (g *Group) endOfSending(ctx context.Context, files *sharedFiles, to raft.ServerID, term uint64) error {
	for {
		change := g.route.next()
		if err := g.maySend(to, term); err != nil {
			return err
		}
		select {
		case <-change:
		case <-files.over:
			return errFilesGivenUp
		case <-ctx.Done():
			return nil
		}
	}
}

// filesFor returns files of the newest snapshot for a node, and keeps the log behind them from then
// on. The caller calls release for the files. If Raft wants another snapshot, filesFor fails, so
// that Raft tries again with this one.
func (g *Group) filesFor(to raft.ServerID, index uint64) (*sharedFiles, error) {
	s := &g.sender
	s.turn.Lock()
	defer s.turn.Unlock()
	files := s.share(to)
	if files != nil && files.Meta.Index < index {
		s.release(files)
		g.giveUpFiles("another leader has sent a later snapshot to this node since")
		files = nil
	}
	if files == nil {
		if !s.holding.Load() && g.growth.bytes.Load() >= g.node.c.SnapshotBytes/freshPart {
			g.takeSnapshot()
		}
		made, err := g.snapshots.Checkpoint()
		if err != nil {
			return nil, err
		}
		files = s.begin(made, to, g.endIdle)
		g.node.log.Info("files of a snapshot are sent", "shard", g.index, "to", to, "index", made.Meta.Index, "bytes", made.Size)
	}
	if files.Meta.Index != index {
		s.release(files)
		return nil, fmt.Errorf("%w: index %d by index %d", errNewerFiles, index, files.Meta.Index)
	}
	return files, nil
}

// freshPart: a transfer begins with a new snapshot if the log behind the last one has grown by more
// than SnapshotBytes/freshPart, so that little log is sent that the files already contain.
const freshPart = 16

// acknowledge records that a node has the log up to an index.
func (g *Group) acknowledge(id raft.ServerID, index uint64) {
	s := &g.sender
	if !s.holding.Load() || !s.follows(id, index) {
		return
	}
	last := g.raft.LastIndex()
	if index+trailingMessages*MaxAppend < last || index+g.log.newest(last, trailingMessages) < last {
		return
	}
	if s.caughtUp(id) {
		g.stopHolding()
	}
}

// endIdle ends a transfer without progress for keepFiles.
func (g *Group) endIdle() {
	g.node.contain("end of a transfer", func() { g.giveUpFiles("they have not got further for long") }, nil)
}

// giveUpFiles ends all transfers, and keeps no more log for them.
func (g *Group) giveUpFiles(why string) {
	if g.sender.end() {
		g.node.log.Warn("files of a snapshot are given up", "shard", g.index, "why", why)
		g.stopHolding()
	}
}

// stopHolding takes a snapshot if one was due.
func (g *Group) stopHolding() { g.grow(0, 0) }

// begin shares new files for a transfer. REQUIRES: there are none, and turn is held.
func (s *snapshotSender) begin(files *snapshot.Checkpoint, to raft.ServerID, endIdle func()) *sharedFiles {
	s.mu.Lock()
	defer s.mu.Unlock()
	raise(&s.held, uint64(files.Size))
	s.files = &sharedFiles{Checkpoint: files, over: make(chan struct{})}
	if s.idle == nil {
		s.idle = time.AfterFunc(keepFiles, endIdle)
	}
	s.idle.Reset(keepFiles)
	if s.behind == nil {
		s.behind, s.furthest = make(map[raft.ServerID]bool), make(map[raft.ServerID]uint64)
	}
	return s.shareLocked(to)
}

// share returns the files for a node; nil if there are none.
func (s *snapshotSender) share(to raft.ServerID) *sharedFiles {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.files == nil {
		return nil
	}
	return s.shareLocked(to)
}

// shareLocked is share. REQUIRES: mu is held, and there are files.
func (s *snapshotSender) shareLocked(to raft.ServerID) *sharedFiles {
	if has, known := s.behind[to]; has || !known {
		s.behind[to], s.furthest[to] = false, 0
	}
	s.holding.Store(true)
	s.files.users++
	return s.files
}

// release ends one use of files that share returned.
func (s *snapshotSender) release(files *sharedFiles) {
	s.mu.Lock()
	defer s.mu.Unlock()
	files.users--
	s.removeUnused(files)
}

// removeUnused removes files that are not being sent, and will not be. REQUIRES: mu is held.
func (s *snapshotSender) removeUnused(files *sharedFiles) {
	if files == nil || files.users > 0 {
		return
	}
	if files == s.files {
		for _, has := range s.behind {
			if !has {
				return
			}
		}
		s.files = nil
	}
	files.Remove()
}

// moves records the progress of a node in the files, and reports whether it is further than before.
func (s *snapshotSender) moves(id raft.ServerID, offset uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.advance(id, offset)
}

// advance is moves, in the files or the log. REQUIRES: mu is held.
func (s *snapshotSender) advance(id raft.ServerID, to uint64) bool {
	if _, ok := s.behind[id]; !ok || to <= s.furthest[id] {
		return false
	}
	s.furthest[id] = to
	s.idle.Reset(keepFiles)
	return true
}

// installed records that a node has all of the files.
func (s *snapshotSender) installed(id raft.ServerID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.behind[id]; ok {
		s.behind[id], s.furthest[id] = true, 0
		s.removeUnused(s.files)
	}
}

// follows records the progress of a node in the log, and reports whether log is kept for it because
// it has the files.
func (s *snapshotSender) follows(id raft.ServerID, index uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.behind[id] {
		return false
	}
	s.advance(id, index)
	return true
}

// caughtUp ends the keeping of log for a node. It reports whether log is kept for none.
func (s *snapshotSender) caughtUp(id raft.ServerID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.behind, id)
	delete(s.furthest, id)
	if len(s.behind) > 0 {
		return false
	}
	return s.endLocked()
}

// end ends all transfers. It reports whether there were any.
func (s *snapshotSender) end() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.endLocked()
}

// endLocked is end. REQUIRES: mu is held.
func (s *snapshotSender) endLocked() bool {
	if s.idle == nil {
		return false
	}
	s.idle.Stop()
	s.idle = nil
	clear(s.behind)
	clear(s.furthest)
	s.holding.Store(false)
	s.held.Store(0)
	if files := s.files; files != nil {
		close(files.over)
		s.removeUnused(files)
		s.files = nil
	}
	return true
}
