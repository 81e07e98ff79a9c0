package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"time"

	"github.com/urfave/cli/v3"

	"codeq"
	"codeq/internal/heldkeys"
	"codeq/internal/private"
)

func (a *app) importCommand() *cli.Command {
	return &cli.Command{
		Name: "import", Category: categoryKeep, Usage: "make a new directory of what export has written",
		Description: "Reads an export and makes the directory -dir, which must not exist or be empty, with -shards\n" +
			"shards. Tasks get other IDs; -ids writes both. -dir appears when all is in it: until then it is\n" +
			"made in -dir.importing, and an import that was interrupted is run again from the beginning.\n" +
			"With -dry-run, the export is read and counted.",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "file", Usage: "read this `FILE`; default: the standard input"},
			&cli.IntFlag{Name: "shards", Usage: "make `N` shards; default: as many as the export had"},
			&cli.DurationFlag{Name: "keep", Value: 24 * time.Hour, Usage: "keep ended tasks for this `TIME` that neither their producer nor their queue gave one"},
			&cli.StringFlag{Name: "ids", Usage: "write the old and the new ID of each task to this new `FILE`, as JSON lines"},
			&cli.BoolFlag{Name: "dry-run", Usage: "read the export to its end, and make nothing"},
		},
		Action: a.importTasks,
	}
}

// importResult is the document of import.
type importResult struct {
	Dir    string
	Shards int
	portableEnd
	// Changed is how many tasks are there without all that they had (their last error, or an
	// attempt), see README.md.
	Changed int  `json:",omitzero"`
	DryRun  bool `json:",omitzero"`
}

func (a *app) importTasks(ctx context.Context, c *cli.Command) (err error) {
	if err := noArguments(c); err != nil {
		return err
	}
	t, err := a.directory(c)
	if err != nil {
		return err
	}
	from := a.in
	if name := c.String("file"); name != "" {
		f, err := os.Open(name)
		if err != nil {
			return coded(exitOther, err)
		}
		defer func() { _ = f.Close() }() // it was only read
		from = f
	}
	r := &lineReader{in: bufio.NewReaderSize(from, 1<<20)}
	head, err := r.header()
	if err != nil {
		return err
	}
	shards := c.Int("shards")
	if shards == 0 {
		shards = head.Shards
	}
	result := importResult{Dir: t.dir, Shards: shards, DryRun: c.Bool("dry-run")}
	if result.DryRun {
		for p := new(portable); p != nil; {
			if p, err = r.next(ctx); err != nil {
				return err
			}
		}
		result.portableEnd = r.seen
		return a.showImport(result)
	}
	place, err := placeOf(t.dir)
	if err != nil {
		return err
	}
	var idLines io.Writer = io.Discard
	if name := c.String("ids"); name != "" {
		f, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err != nil {
			return coded(exitOther, err)
		}
		w := bufio.NewWriter(f)
		defer func() { err = errors.Join(err, w.Flush(), f.Close()) }()
		idLines = w
	}
	im := newImporter(ctx, a.now, json.NewEncoder(idLines))
	open := func() (*codeq.Queue, error) { return place.open(shards, c.Duration("keep")) }
	if err := im.make(r, open, place.queue()); err != nil {
		return err
	}
	if err := place.finish(); err != nil {
		return err
	}
	result.portableEnd, result.Changed = r.seen, im.changed
	return a.showImport(result)
}

func (a *app) showImport(r importResult) error {
	did := "imported"
	if r.DryRun {
		did = "would import"
	}
	if r.Changed > 0 {
		a.note("codeq: %d tasks have lost their last error or an attempt", r.Changed)
	}
	return a.result(r, "%s %d tasks, %d schedules, the settings of %d queues, %d keys of tasks that are gone into %s, %d shards",
		did, r.Tasks, r.Schedules, r.Settings, r.Keys, r.Dir, r.Shards)
}

// lineReader reads an export.
type lineReader struct {
	in    *bufio.Reader
	line  int
	stage stage // of the last task
	// keys are those that outlive their tasks. No verb of a queue makes them: they are stored when
	// it is closed.
	keys []heldkeys.Key
	seen portableEnd
}

func (r *lineReader) read() (*portable, error) {
	b, err := r.in.ReadBytes('\n')
	if err != nil && !(err == io.EOF && len(b) > 0) {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return nil, r.wrong("it is cut short: %w", err)
	}
	r.line++
	p := new(portable)
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(p); err != nil {
		return nil, r.wrong("%w", err)
	}
	if !p.fromJSON() {
		return nil, r.wrong("its strings are not as export writes them")
	}
	return p, nil
}

func (r *lineReader) wrong(format string, args ...any) error {
	return coded(exitDamaged, fmt.Errorf("line %d of the export: %w", r.line, fmt.Errorf(format, args...)))
}

func (r *lineReader) header() (*portableHeader, error) {
	p, err := r.read()
	if err != nil {
		return nil, err
	}
	h := p.Header
	if h == nil || h.Codeq != "export" || h.Shards < 1 {
		return nil, r.wrong("it is not what export writes")
	}
	if h.Version < 1 || h.Version > portableVersion {
		return nil, r.wrong("it is of version %d, and not %d or less", h.Version, portableVersion)
	}
	return h, nil
}

// next returns the next line; nil: all have been read, and none is missing.
func (r *lineReader) next(ctx context.Context) (*portable, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	p, err := r.read()
	if err != nil {
		return nil, err
	}
	switch {
	case p.Settings != nil:
		r.seen.Settings++
	case p.Schedule != nil:
		r.seen.Schedules++
	case p.Key != nil:
		key, err := p.Key.held()
		if err != nil {
			return nil, r.wrong("%w", err)
		}
		r.keys = append(r.keys, key)
		r.seen.Keys++
	case p.Task != nil:
		if p.Task.stage() < r.stage {
			return nil, r.wrong("its order is not that of export")
		}
		r.stage = p.Task.stage()
		r.seen.Tasks++
	case p.End != nil:
		if *p.End != r.seen {
			return nil, r.wrong("it has counted %+v, and there are %+v", *p.End, r.seen)
		}
		if _, err := r.in.ReadByte(); err != io.EOF {
			return nil, r.wrong("something follows its end")
		}
		return nil, nil
	default:
		return nil, r.wrong("it is empty")
	}
	return p, nil
}

// place is where a directory is made: beside its own place, until it is whole.
type place struct {
	dir, work string
}

// importMark is a file that says that a directory belongs to an import.
const importMark = "IMPORT"

// placeOf prepares the place of a new directory, and clears what an interrupted import has left.
func placeOf(dir string) (*place, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	names, err := private.FS.List(dir)
	switch {
	case err == nil && len(names) > 0:
		return nil, coded(exitRefused, fmt.Errorf("%s is not empty: import makes a new directory", dir))
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return nil, coded(exitRefused, err)
	}
	p := &place{dir, dir + ".importing"}
	if _, err := os.Lstat(p.work); err == nil {
		if _, err := os.Lstat(filepath.Join(p.work, importMark)); err != nil {
			return nil, coded(exitRefused, fmt.Errorf("%s exists, and no import has made it", p.work))
		}
		// Another import that goes on has it locked.
		if r, err := codeq.OpenReadOnly(p.queue(), nil); err == nil {
			_ = r.Close() // it was only read
		} else if errors.Is(err, codeq.ErrLocked) {
			return nil, err
		}
		if err := os.RemoveAll(p.work); err != nil {
			return nil, err
		}
	}
	if err := private.FS.MkdirAll(p.work, private.DirMode); err != nil {
		return nil, coded(exitOther, err)
	}
	return p, os.WriteFile(filepath.Join(p.work, importMark), nil, 0o600)
}

func (p *place) queue() string { return filepath.Join(p.work, "queue") }

// open makes the queue, which takes all that any queue takes.
func (p *place) open(shards int, keep time.Duration) (*codeq.Queue, error) {
	return codeq.Open(p.queue(), &codeq.Options{
		Shards: shards, Retention: keep, LeaseFor: importLease, MaxAttempts: math.MaxInt32,
		Limits: codeq.Limits{Payload: 64 << 20, Headers: 1 << 20, Name: 4096, BatchBytes: 256 << 20},
	})
}

// importLease is how long the tasks of a chunk are leased at the most.
const importLease = time.Hour

// finish puts the directory in its place. It is durable then.
func (p *place) finish() error {
	err := filepath.WalkDir(p.queue(), func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() && !d.IsDir() {
			return err
		}
		return syncFile(path, d.IsDir())
	})
	if err != nil {
		return err
	}
	if err := os.Remove(p.dir); err != nil && !errors.Is(err, fs.ErrNotExist) { // it was empty
		return err
	}
	if err := os.Rename(p.queue(), p.dir); err != nil {
		return err
	}
	if err := os.RemoveAll(p.work); err != nil {
		return err
	}
	return syncFile(filepath.Dir(p.dir), true)
}
