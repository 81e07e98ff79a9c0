package main

import (
	"bufio"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"codeq"
)

// hashTask returns a task that keeps its result until the queue is removed.
func hashTask(file string) codeq.Task {
	return codeq.Task{Queue: hashQueue, Payload: []byte(file), MaxAttempts: attempts, Retention: codeq.Forever}
}

// hash stores the digest of a file as the result of the task.
func (t *tree) hash(ctx context.Context, job *codeq.Job[[]byte]) error {
	name := string(job.Args)
	onHash(t, name)
	digest, err := digestOf(ctx, t.path(name))
	if err != nil {
		return failed(job.Attempt, err)
	}
	job.SetResult(digest)
	return nil
}

func digestOf(ctx context.Context, path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil {
		return nil, err
	} else if !info.Mode().IsRegular() {
		return nil, errors.New("no longer a regular file")
	}
	h := sha256.New()
	if _, err := io.Copy(h, reader{ctx, f}); err != nil {
		return nil, err
	}
	return h.Sum(nil), nil
}

// reader stops a long read when the handler has to end.
type reader struct {
	ctx context.Context
	r   io.Reader
}

func (r reader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.r.Read(p)
}

// report prints the digests, sorted by name, and the errors of files that could not be read.
func (t *tree) report(stdout, stderr io.Writer) (unread int, err error) {
	type entry struct {
		name, text string // text is the digest, or an error
	}
	list := func(queue string, state codeq.State, add func(*codeq.TaskInfo)) error {
		for task, err := range t.queue.List(context.Background(), codeq.ListOptions{Queue: queue, State: state}) {
			if err != nil {
				return err
			}
			add(task)
		}
		return nil
	}
	var sums, failures []entry
	unreadable := func(task *codeq.TaskInfo) {
		name, _, _ := strings.Cut(string(task.Payload), "\x00")
		failures = append(failures, entry{name, task.LastError})
	}
	err = errors.Join(
		list(hashQueue, codeq.Done, func(task *codeq.TaskInfo) {
			sums = append(sums, entry{string(task.Payload), string(task.Result)})
		}),
		list(hashQueue, codeq.Dead, unreadable),
		list(walkQueue, codeq.Dead, unreadable),
	)
	if err != nil {
		return 0, err
	}
	byName := func(a, b entry) int { return cmp.Compare(a.name, b.name) }
	slices.SortFunc(sums, byName)
	slices.SortFunc(failures, byName)
	for _, f := range failures {
		fmt.Fprintf(stderr, "treesum: %s: %s\n", t.shown(f.name), f.text)
	}
	w := bufio.NewWriter(stdout)
	for _, s := range sums {
		_, _ = w.WriteString(line(s.text, t.shown(s.name))) // Flush has its error
	}
	return len(failures), w.Flush()
}

var escape = strings.NewReplacer(`\`, `\\`, "\n", `\n`)

// line returns the line of sha256sum for a file. A name with a backslash or a newline is escaped;
// then the line begins with a backslash.
func line(digest, name string) string {
	escaped := escape.Replace(name)
	mark := ""
	if escaped != name {
		mark = `\`
	}
	return fmt.Sprintf("%s%x  %s\n", mark, digest, escaped)
}
