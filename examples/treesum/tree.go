package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"time"

	"codeq"
)

// The queues. The payloads of walk and hash are paths below the tree, in the bytes of the file
// system, which need not be UTF-8; "" is the tree itself.
const (
	treeQueue = "tree" // one task, without a handler; its payload is the root of the tree
	walkQueue = "walk" // a directory, a zero byte, and the name to continue after
	hashQueue = "hash" // a file; the result is its digest
)

// tree is a file tree and the queue of the work on it.
type tree struct {
	arg   string      // from the command line
	root  string      // absolute, without symbolic links
	file  bool        // the tree is a single file
	dir   string      // of the queue
	self  fs.FileInfo // of dir, which is not walked
	queue *codeq.Queue
}

// openTree opens or creates the queue of a tree.
func openTree(c *config) (*tree, error) {
	info, err := os.Lstat(c.tree)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() && !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s: neither a directory nor a regular file", c.tree)
	}
	t := &tree{arg: c.tree, file: !info.IsDir(), dir: c.queue}
	if t.root, err = absolute(c.tree); err != nil {
		return nil, err
	}
	if t.dir == "" {
		if t.dir, err = defaultDir(t.root); err != nil {
			return nil, err
		}
	}
	t.queue, err = codeq.Open(t.dir, &codeq.Options{
		// Follow-ups are in the shard of their parent, and all tasks are follow-ups of the first
		// one: more shards would stay empty.
		Shards:     1,
		Durability: c.durability,
		Backoff:    codeq.Backoff{Base: 100 * time.Millisecond, Max: time.Second},
	})
	if err != nil {
		return nil, err
	}
	if t.dir, err = absolute(t.dir); err == nil {
		t.self, err = os.Stat(t.dir)
	}
	if err == nil && os.SameFile(info, t.self) {
		err = errors.New("the queue cannot be the tree")
	}
	if err == nil {
		err = os.RemoveAll(t.dir + removed)
	}
	if err != nil {
		return nil, errors.Join(err, t.queue.Close())
	}
	return t, nil
}

// removed is the suffix of a queue's directory during its removal.
const removed = ".treesum-removed"

// remove removes the queue in two steps, so that Open never finds half of it. After a kill during
// the second step, the next openTree finishes it.
func (t *tree) remove() error {
	if err := t.queue.Close(); err != nil {
		return err
	}
	if err := os.Rename(t.dir, t.dir+removed); err != nil {
		return err
	}
	return os.RemoveAll(t.dir + removed)
}

func defaultDir(root string) (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("%w; say by -queue where to keep the queue", err)
	}
	return filepath.Join(cache, "treesum", fmt.Sprintf("%x", sha256.Sum256([]byte(root)))), nil
}

func absolute(path string) (string, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	return filepath.EvalSymlinks(path)
}

// begin produces the first tasks if the queue is new. The task of treeQueue and the first task of
// the walk are one commit: if the former exists, the walk has begun.
func (t *tree) begin() error {
	ctx := context.Background() // short, so not interrupted
	counts, err := t.queue.Stats(ctx)
	if err != nil {
		return err
	}
	if counts[treeQueue].Total() == 0 {
		first := walkTask("", "")
		if t.file {
			first = hashTask("")
		}
		mark := codeq.Task{Queue: treeQueue, Payload: []byte(t.root)}
		_, err := t.queue.ProduceBatch(ctx, []codeq.Task{mark, first})
		return err
	}
	for mark, err := range t.queue.List(ctx, codeq.ListOptions{Queue: treeQueue, State: codeq.Ready}) {
		if err != nil {
			return err
		}
		if string(mark.Payload) != t.root {
			return fmt.Errorf("the queue in %s is that of %s", t.dir, mark.Payload)
		}
	}
	return nil
}

// tries is the number of reads before a file counts as unreadable.
const tries = 3

// attempts is Task.MaxAttempts: practically no limit, since a kill of the process also counts as an
// attempt. failed uses tries.
const attempts = math.MaxInt32

// failed ends an attempt with a read error.
func failed(attempt int, err error) error {
	if pathErr := (*fs.PathError)(nil); errors.As(err, &pathErr) {
		err = pathErr.Err // the report prints the path itself
	}
	if attempt >= tries {
		return codeq.DeadLetter(err)
	}
	return err
}

// work runs the handlers until all tasks are done or ctx ends.
func (t *tree) work(ctx context.Context, workers int, p *progress) error {
	var mux codeq.Mux
	codeq.Handle(&mux, walkQueue, t.walk)
	codeq.Handle(&mux, hashQueue, t.hash)
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	idle, ended := make(chan error, 1), make(chan error, 1)
	go func() {
		ended <- t.queue.Run(ctx, &mux, &codeq.RunOptions{
			Concurrency: workers,
			Queues:      []string{walkQueue, hashQueue}, // walk first, to know the number of files early
			Grace:       -1,                             // a half-read file is read again
		})
	}()
	go func() { idle <- t.queue.WaitIdle(ctx, walkQueue, hashQueue) }()
	tick := time.NewTicker(time.Second / 10) // for the progress bar
	defer tick.Stop()
	for {
		select {
		case <-idle: // or ctx has ended, or the queue has failed: then Run returns the error
			stop()
			return <-ended
		case err := <-ended:
			return err
		case <-tick.C:
			done, left, err := t.state()
			if err != nil {
				stop()
				return errors.Join(err, <-ended)
			}
			p.show(done, done+left)
		}
	}
}

// state returns the numbers of finished files and of remaining tasks. left is 0 only at the end:
// the commit that completes the walk of a directory also produces the tasks of its entries.
func (t *tree) state() (done, left uint64, err error) {
	counts, err := t.queue.Stats(context.Background())
	if err != nil {
		return 0, 0, err
	}
	for _, name := range []string{walkQueue, hashQueue} {
		c := counts[name]
		left += c.Ready + c.Scheduled + c.Leased
	}
	return counts[hashQueue].Done + counts[hashQueue].Dead, left, nil
}

// path returns the path of a file of the tree.
func (t *tree) path(name string) string { return filepath.Join(t.root, name) }

// shown returns a file's name in the form of find.
func (t *tree) shown(name string) string {
	switch {
	case name == "":
		return t.arg
	case os.IsPathSeparator(t.arg[len(t.arg)-1]):
		return t.arg + name
	}
	return t.arg + string(filepath.Separator) + name
}
