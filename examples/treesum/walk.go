package main

import (
	"bytes"
	"context"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"codeq"
)

// pageSize is the maximum number of entries that one task of walk turns into tasks. It bounds a
// commit: so many paths of 4,096 bytes, the maximum of Linux, are within the default
// Limits.BatchBytes. A directory is read once for each page.
const pageSize = 4000

// onWalk and onHash are called before each read. Tests replace them.
var (
	onWalk = func(*tree, string) {}
	onHash = func(*tree, string) {}
)

// walkTask returns a task for the entries of a directory after a name; "": all entries. No path
// contains a zero byte.
func walkTask(dir, after string) codeq.Task {
	return codeq.Task{Queue: walkQueue, Payload: []byte(dir + "\x00" + after), MaxAttempts: attempts}
}

// walk turns a page of a directory into tasks.
func (t *tree) walk(_ context.Context, job *codeq.Job[[]byte]) error {
	dir, after, _ := bytes.Cut(job.Args, []byte{0})
	name := string(dir)
	onWalk(t, name)
	entries, more, err := t.readPage(name, string(after), pageSize)
	if err != nil {
		return failed(job.Attempt, err)
	}
	for _, e := range entries {
		below := filepath.Join(name, e.Name())
		if e.IsDir() {
			job.FollowUp(walkTask(below, ""))
		} else {
			job.FollowUp(hashTask(below))
		}
	}
	if more {
		job.FollowUp(walkTask(name, entries[len(entries)-1].Name()))
	}
	return nil
}

// readPage returns the first n directories and regular files of a directory after a name, in the
// order of their names, and whether there are more. A name that stays is in exactly one page, even
// if other entries are added or removed meanwhile.
func (t *tree) readPage(dir, after string, n int) (page []fs.DirEntry, more bool, err error) {
	d, err := os.Open(t.path(dir))
	if err != nil {
		return nil, false, err
	}
	defer d.Close()
	if info, err := d.Stat(); err != nil {
		return nil, false, err
	} else if os.SameFile(info, t.self) {
		return nil, false, nil
	}
	last := "" // the last name of a full page
	cut := func() {
		slices.SortFunc(page, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
		if len(page) > n {
			clear(page[n:])
			page, more = page[:n], true
			last = page[n-1].Name()
		}
	}
	for {
		entries, err := d.ReadDir(1000)
		for _, e := range entries {
			if (e.IsDir() || e.Type().IsRegular()) && e.Name() > after && (!more || e.Name() < last) {
				page = append(page, e)
			}
		}
		if len(page) > 2*n { // bounds the memory for large directories
			cut()
		}
		if err == io.EOF {
			cut()
			return page, more, nil
		}
		if err != nil {
			return nil, false, err
		}
	}
}
