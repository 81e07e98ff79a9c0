package fsck

import "codeq/internal/keys"

// bucketKind is a kind of errors in a bucket.
type bucketKind struct {
	keys.Place
	kind uint32
}

// queueKind is a kind of errors of a queue.
type queueKind struct{ queue, kind uint32 }

// foundKind has the dead letters of a kind in a bucket, by their records.
type foundKind struct {
	all  keys.KindCount
	last map[keys.ID]bool // those that died last
}

// foundDead notes the kind of a dead letter that has one.
func (c *checker) foundDead(id keys.ID, p keys.Place, kind uint32, died uint64) {
	at := bucketKind{p, kind - 1}
	f := c.kinds[at]
	if f == nil {
		f = new(foundKind)
		c.kinds[at] = f
	}
	var one keys.BucketValue
	one.Add(kind-1, id, died)
	if died > f.all.At {
		f.last = make(map[keys.ID]bool)
	}
	if f.all.Join(&one.Kinds[0]); died == f.all.At {
		f.last[id] = true
	}
}

// bucketKinds compares the counts of a bucket with those of its records.
func (c *checker) bucketKinds(p keys.Place, v *keys.BucketValue) {
	for i := range v.Kinds {
		k := v.Kinds[i]
		at := bucketKind{p, k.Kind}
		f := c.kinds[at]
		delete(c.kinds, at)
		if k.Kind != keys.OtherKinds {
			c.usedKinds[queueKind{p.Group, k.Kind}] = true
		}
		if f == nil {
			c.report("bucket %+v counts %+v, and has none", p, k)
			continue
		}
		want := keys.KindCount{At: k.At} // its days go by those that have left it, too
		want.Join(&f.all)
		if want.Kind, want.Last = k.Kind, k.Last; k.At < f.all.At || want != k {
			c.report("bucket %+v counts %+v, and has %+v", p, k, f.all)
		}
		if k.Last != (keys.ID{}) && (!f.last[k.Last] || k.At != f.all.At) {
			c.report("bucket %+v counts %+v, whose last one is another", p, k)
		}
	}
	if len(v.Kinds) > keys.MostKinds+1 || p.Range != keys.Dead && len(v.Kinds) > 0 {
		c.report("bucket %+v has %d kinds of errors", p, len(v.Kinds))
	}
}

// deadKind checks the text of a kind.
func (c *checker) deadKind(key, _ []byte) error {
	queue, kind, err := keys.ParseDeadKind(key)
	if at := (queueKind{queue, kind}); err != nil || !c.usedKinds[at] {
		c.report("kind %d of errors of queue %d is counted in no bucket: %v", kind, queue, err)
	} else {
		delete(c.usedKinds, at)
	}
	return nil
}

// finishKinds reports gaps in the counts.
func (c *checker) finishKinds() {
	for at, f := range c.kinds {
		c.report("bucket %+v has %+v of kind %d, and does not count them", at.Place, f.all, at.kind)
	}
	for at := range c.usedKinds {
		c.report("kind %d of errors of queue %d has no text", at.kind, at.queue)
	}
}
