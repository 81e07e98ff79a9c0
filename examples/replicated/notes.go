package main

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
)

// The suffixes of the notes of a node.
const (
	ackedNotes = ".acked" // numbers of the tasks acknowledged to its producers
	doneNotes  = ".done"  // numbers of the tasks done by its workers
)

// notes is a file of lines. A line of add survives a kill of the process, since the operating
// system has it.
type notes struct{ *os.File }

func openNotes(path string) (*notes, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o666)
	return &notes{f}, err
}

// add appends a line, by one write. Several goroutines may do so at a time.
func (n *notes) add(line string) error {
	_, err := n.WriteString(line + "\n")
	return err
}

// readNotes counts each line in the notes of all nodes.
func readNotes(c *config, what string) (map[string]int, error) {
	lines := make(map[string]int)
	for i := 1; i <= nodes; i++ {
		f, err := os.Open(c.path(i, what))
		if errors.Is(err, fs.ErrNotExist) { // killed before its first note
			continue
		}
		if err != nil {
			return nil, err
		}
		s := bufio.NewScanner(f)
		for s.Scan() {
			lines[s.Text()]++
		}
		if err := errors.Join(s.Err(), f.Close()); err != nil {
			return nil, err
		}
	}
	return lines, nil
}

// tally is the summary of the notes.
type tally struct {
	acked   int    // acknowledged tasks
	lost    int    // acknowledged tasks that were never done
	first   string // one of the lost tasks
	done    int    // done tasks
	again   int    // repeated executions
	unacked int    // done tasks without a note, since their producer was killed
}

// compare compares the acknowledged tasks with the done ones.
func compare(c *config) (t tally, err error) {
	acked, err := readNotes(c, ackedNotes)
	if err != nil {
		return t, err
	}
	done, err := readNotes(c, doneNotes)
	if err != nil {
		return t, err
	}
	t.acked, t.done = len(acked), len(done)
	for number := range acked {
		if done[number] == 0 {
			t.lost++
			t.first = number
		}
	}
	for number, times := range done {
		t.again += times - 1
		if acked[number] == 0 {
			t.unacked++
		}
	}
	return t, nil
}

func (t tally) String() string {
	s := fmt.Sprintf("%d tasks acknowledged: %d lost", t.acked, t.lost)
	if t.lost > 0 {
		s += fmt.Sprintf(" (such as %s)", t.first)
	}
	return s + fmt.Sprintf("; %d done, of which %d were not acknowledged; %d times one was done again",
		t.done, t.unacked, t.again)
}
