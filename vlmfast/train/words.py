"""The words that printed pages are set from: some five hundred of the commonest of English."""

from __future__ import annotations

_TEXT = """
a about above across act add after again against age ago air all almost alone along also always am an and animal
another answer any apple are arm around art as ask at away baby back bad bag ball band bank base be bear beat bed
been before began behind below best better between big bird bit black blood blue board boat body bone book both
bottom box boy bread break bring brother brown build busy but buy by cake call came camp can car card care carry
case cat catch chair change child city class clean clear close cloud coat cold colour come cook cool corn cost could
count country cover cross cry cup cut dance dark day deep did dish do dog done door down draw dream dress drink
drive drop dry during each ear early earth east easy eat edge egg end even evening ever every eye face fact fall
family far farm fast father feel feet few field fill find fine fire first fish five floor flower fly follow food
foot for forest form four free fresh friend from front fruit full game garden gave get girl give glad glass go
gold gone good great green ground group grow had half hand happy hard has hat have he head hear heart heavy help
her here high hill him his hold hole home hope horse hot hour house how hundred ice idea if in inside into iron is
island it job join just keep kind king kitchen knew know lady lake land large last late laugh law learn leave left
leg less let letter life light like line list listen little live long look lost lot love low made make man many
map mark market may me meal mean meat meet men milk mind minute miss money month moon more morning most mother
mountain mouth move much music must my name near neck need never new next nice night nine no noise north nose not
note now number of off office often oil old on once one only open or orange order other our out over own page
paint pair paper park part party pass path people piece place plan plant play point poor pull push put queen
quick quiet rain ran reach read ready red rest rice rich ride right ring river road rock room rose round run safe
said salt same sand sat saw say school sea seat second see seed seem seven shape she ship shoe shop short should
show side silver sing sister sit six size skin sky sleep slow small smile snow so soft some son song soon sound
south space speak spring stand star start station stay step still stone stop store storm story street strong such
sugar summer sun sure sweet swim table tail take talk tall taste teach tell ten than that the their them then
there these they thing think this three time to today together told too took top town train travel tree trip
true try turn two uncle under until up us use very visit voice wait walk wall want warm was wash watch water way
we wear week well went were west wet what wheel when where which white who wide wild will wind window winter wish
with woman wood word work world would write year yellow yes yet you young your zoo
"""

PAGE_WORDS = tuple(_TEXT.split())
