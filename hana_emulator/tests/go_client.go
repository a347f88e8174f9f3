// go run go_client.go PORT USER PASSWORD: everyday work with go-hdb, SAP's driver for Go; exit 0 if all went well
package main

import (
	"bytes"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/SAP/go-hdb/driver"
)

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func equal[T comparable](found, expected T) {
	if found != expected {
		panic(fmt.Sprintf("%v is not %v", found, expected))
	}
}

func code(err error) int {
	var found driver.Error
	if !errors.As(err, &found) {
		panic(fmt.Sprintf("%v is not an error of HANA", err))
	}
	return found.Code()
}

func main() {
	db := sql.OpenDB(driver.NewBasicAuthConnector("127.0.0.1:"+os.Args[1], os.Args[2], os.Args[3]))
	defer db.Close()
	exec := func(statement string, values ...any) {
		_, err := db.Exec(statement, values...)
		must(err)
	}
	exec("CREATE TABLE GO (ID INTEGER PRIMARY KEY, N NVARCHAR(20), T NCLOB, B BLOB, V REAL_VECTOR(3))")

	insert, err := db.Prepare("bulk insert into GO (ID, N) values (?, ?)")
	must(err)
	for number := 0; number < 2500; number++ {
		_, err := insert.Exec(number, fmt.Sprintf("näme %d 😀", number))
		must(err)
	}
	_, err = insert.Exec() // sends the rest
	must(err)
	must(insert.Close())

	rows, err := db.Query("SELECT ID, N FROM GO ORDER BY ID")
	must(err)
	count := 0
	for ; rows.Next(); count++ {
		var id int
		var name string
		must(rows.Scan(&id, &name))
		equal(id, count)
		equal(name, fmt.Sprintf("näme %d 😀", count))
	}
	must(rows.Err())
	equal(count, 2500)

	long, raw := strings.Repeat("lang 😀 ", 50_000), bytes.Repeat([]byte{7}, 300_000)
	writing, err := db.Begin() // go-hdb writes LOBs only within a transaction
	must(err)
	update, err := writing.Prepare("UPDATE GO SET T = ?, B = ?, V = TO_REAL_VECTOR(?) WHERE ID = ?")
	must(err)
	given := func(value string) *driver.Lob { return driver.NewLob(strings.NewReader(value), nil) }
	_, err = update.Exec(given(long), driver.NewLob(bytes.NewReader(raw), nil), given("[1,2,3.5]"), 1)
	must(err)
	must(writing.Commit())
	var text, binary bytes.Buffer
	var vector string
	read := "SELECT T, B, TO_NVARCHAR(V) FROM GO WHERE ID = ?"
	must(db.QueryRow(read, 1).Scan(driver.NewLob(nil, &text), driver.NewLob(nil, &binary), &vector))
	equal(text.String() == long, true)
	equal(bytes.Equal(binary.Bytes(), raw), true)
	equal(vector, "[1,2,3.5]")

	for _, rollback := range []bool{true, false} {
		transaction, err := db.Begin()
		must(err)
		_, err = transaction.Exec("DELETE FROM GO WHERE ID >= 20")
		must(err)
		if rollback {
			must(transaction.Rollback())
		} else {
			must(transaction.Commit())
		}
		must(db.QueryRow("SELECT COUNT(*) FROM GO").Scan(&count))
		equal(count, map[bool]int{true: 2500, false: 20}[rollback])
	}

	var first int
	must(db.QueryRow("SELECT ID FROM GO WHERE N LIKE ? AND ID BETWEEN ? AND ? ORDER BY ID", "näme%", 3, 5).Scan(&first))
	equal(first, 3)
	_, err = db.Exec("SELECT * FROM NOSUCH")
	equal(code(err), 259)
	_, err = db.Exec("INSERT INTO GO (ID) VALUES (1)")
	equal(code(err), 301)
	embed := "SELECT CARDINALITY(VECTOR_EMBEDDING('pump', 'QUERY', ?)) FROM DUMMY"
	must(db.QueryRow(embed, "SAP_NEB.20240715").Scan(&count))
	equal(count, 768)
	exec("DROP TABLE GO")
	fmt.Println("ok")
}
